"""Which shard is computed again, and who was wrong when two ranks come to other bits."""

import math
import random
from collections import Counter

import pytest

from dure.data.shards import rank_of_shard
from dure.step.shadow import Told, chosen, judge

A, B, C = [1, 2, 3], [1, 2, 4], [1, 5, 6]


def told(*digests):
    return [Told(f"host-{rank}", [list(one) for one in ones]) for rank, ones in enumerate(digests)]


def test_every_shard_and_every_other_rank_has_its_turn_as_often_as_the_share_says():
    share, ranks, shards, steps = 0.25, 3, 7, 20_000
    asked = [chosen(3, share, step, 0, shards, ranks, shards) for step in range(steps)]
    found = [one for one in asked if one is not None]
    assert abs(len(found) - steps * share) < 4 * math.sqrt(steps * share * (1 - share))
    for of in (Counter(one.shard for one in found), Counter(one.by for one in found)):
        assert min(of.values()) > 0.7 * len(found) / len(of)
    assert {one.shard for one in found} == set(range(shards))
    assert all(one.owner == rank_of_shard(one.shard, ranks, shards) != one.by for one in found)
    assert found == [
        one for one in (chosen(3, share, s, 0, shards, ranks, shards) for s in range(steps)) if one
    ]


def test_all_steps_none_short_batches_and_other_losses():
    assert all(chosen(1, 1.0, step, 0, 8, 2, 8) for step in range(500))
    assert not any(chosen(1, 0.0, step, 0, 8, 2, 8) for step in range(500))
    assert all(chosen(1, 1.0, step, 0, 2, 4, 8).shard < 2 for step in range(500))
    alone = chosen(1, 1.0, 5, 0, 8, 1, 8)
    assert alone.owner == alone.by == 0
    assert [chosen(1, 1.0, s, 0, 8, 2, 8) for s in range(50)] != [
        chosen(1, 1.0, s, 1, 8, 2, 8) for s in range(50)
    ]


@pytest.mark.parametrize(
    ("everyones", "right", "wrong", "unsteady"),
    [
        # Three ranks: the owner, the one that computes its shard again, a third.
        (told([B, A], [A, A], [A]), A, [0], [0]),
        (told([B, B], [A, A], [A]), A, [0], []),
        (told([A, A], [B, A], [A]), A, [1], [1]),
        (told([A, A], [B, B], [A]), A, [1], []),
        (told([B, B], [C, C], [A]), None, [], []),
        (told([B, B], [A, A], [A], [B]), None, [], []),
        (told([B, B], [A, A], [A], [B], [A]), A, [0, 3], []),
        # Two ranks, each once more.
        (told([B, A], [A, A]), A, [0], [0]),
        (told([A, A], [B, A]), A, [1], [1]),
        (told([A, A], [B, B]), None, [], []),
        (told([B, C], [A, A]), None, [], [0]),
        # One.
        (told([B, A, A]), A, [0], [0]),
        (told([A, B, A]), A, [0], [0]),
        (told([A, B, C]), None, [], [0]),
    ],
)
def test_the_majority_decides(everyones, right, wrong, unsteady):
    verdict = judge(everyones)
    assert (verdict.right, verdict.wrong, verdict.unsteady) == (right, wrong, unsteady)


def test_one_wrong_rank_among_three_or_more_is_always_the_one_that_is_named():
    dice = random.Random(4)
    for _ in range(500):
        ranks = dice.randrange(3, 9)
        owner, by = dice.sample(range(ranks), 2)
        odd = dice.choice((owner, by))
        digests = [[[7, 7]] * (2 if rank in (owner, by) else 1) for rank in range(ranks)]
        digests[odd] = [[7, 8], [7, dice.choice((7, 8, 9))]]
        verdict = judge(told(*digests))
        assert (verdict.right, verdict.wrong) == ([7, 7], [odd])
