"""The order of addition depends on the number of leaves alone, however they are spread."""

import itertools
import random
import time

from hypothesis import given
from hypothesis import strategies as st

from dure.comm import tree
from dure.comm.reduce.exchanger import most_pieces
from dure.config.limits import MOST_SHARDS
from dure.data.shards import Split


def reference(values):
    """The tree as its definition says: halves of the next power of two, left before right."""
    if len(values) == 1:
        return values[0]
    half = 1
    while half * 2 < len(values):
        half *= 2
    return reference(values[:half]) + reference(values[half:])


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=70))
def test_the_sum_is_the_balanced_trees(values):
    assert tree.tree_sum(values) == reference(values)


@given(st.integers(1, 40), st.data())
def test_any_cut_into_runs_gives_the_same_bits(leaves, data):
    cuts = sorted({0, leaves, *data.draw(st.lists(st.integers(0, leaves)))})
    dice = random.Random(leaves)
    values = [dice.uniform(-1, 1) * 10 ** dice.randint(-8, 8) for _ in range(leaves)]
    pieces, sums = [], []
    for start, stop in itertools.pairwise(cuts):
        for piece in tree.subtrees(range(start, stop), leaves):
            pieces.append(piece)
            sums.append(reference([values[leaf] for leaf in piece]))
    additions, roots = tree.join_order(pieces, leaves)
    for left, right in additions:
        sums[left] += sums[right]
    assert [sums[root] for root in roots] == [tree.tree_sum(values)]


def test_an_odd_ranks_shards_are_two_subtrees():
    assert tree.subtrees(range(3, 6), 8) == [range(3, 4), range(4, 6)]


@given(st.integers(1, 64), st.data())
def test_subtrees_cover_the_run_and_are_few(leaves, data):
    start = data.draw(st.integers(0, leaves - 1))
    stop = data.draw(st.integers(start + 1, leaves))
    found = tree.subtrees(range(start, stop), leaves)
    assert [leaf for piece in found for leaf in piece] == list(range(start, stop))
    assert len(found) <= 2 * leaves.bit_length()


@given(st.integers(1, 64), st.data())
def test_subtrees_are_what_joining_single_leaves_comes_to(leaves, data):
    start = data.draw(st.integers(0, leaves - 1))
    stop = data.draw(st.integers(start + 1, leaves))
    _, roots = tree.join_order([range(leaf, leaf + 1) for leaf in range(start, stop)], leaves)
    assert [piece.start for piece in tree.subtrees(range(start, stop), leaves)] == [
        start + root for root in roots
    ]


def test_the_most_shards_that_a_job_may_have_are_cut_in_a_moment():
    began = time.process_time()
    assert max(most_pieces(rank, 7, MOST_SHARDS) for rank in range(7)) < 32
    split = Split(10 * MOST_SHARDS, MOST_SHARDS, MOST_SHARDS, "blocks")
    assert sum(len(split.positions(3, shard)) for shard in range(MOST_SHARDS)) == MOST_SHARDS
    assert time.process_time() - began < 30


def test_nothing_adds_up_to_zero():
    assert tree.tree_sum([]) == 0.0
