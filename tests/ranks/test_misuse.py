"""What a script does wrong is one line with the way out, before it can give other bits on other numbers of ranks."""

import time

import pytest
from support import misuse

from dure.base.errors import RankFailed
from dure.base.run_folder import RunFolder
from dure.launch import run_team

CASES = {**misuse.ON_ANY, **misuse.ON_TWO}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    names = [case.__name__ for case in CASES]
    folder = RunFolder(tmp_path_factory.mktemp("misuse"))
    return run_team("support.misuse:refusals", (names,), ranks=2, folder=folder, hang_seconds=300)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_is_refused_on_all_ranks_with_the_way_out(told, case):
    for rank in told:
        for words in CASES[case]:
            assert words in rank[case.__name__]


@pytest.mark.parametrize("case", misuse.ON_ANY, ids=lambda case: case.__name__)
def test_is_refused_on_one_rank_too(case):
    told = misuse.refusals([case.__name__])[case.__name__]
    for words in misuse.ON_ANY[case]:
        assert words in told


def test_an_unreduced_loss_of_two_samples_is_not_taken_for_a_sum_and_a_count(tmp_path):
    one = misuse.two_sample_shards()
    shas = run_team(
        "support.misuse:two_sample_shards", (), ranks=2, folder=RunFolder(tmp_path), hang_seconds=300
    )
    assert shas == [one] * 2


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("evaluate", ["rank 0 in evaluate; rank 1 in forward_backward of step 3", "`if team.is_leader`"]),
        (
            "stop early",
            ["rank 0 in prove; rank 1 in forward_backward of step 3", "loop end earlier on one rank"],
        ),
        ("leave", ["rank 0 has left the team, and rank 1 is in forward_backward of step 3"]),
    ],
)
def test_ranks_in_different_calls_are_told_so_long_before_their_deadline(how, words, tmp_path):
    began = time.monotonic()
    with pytest.raises(RankFailed) as failed:
        run_team(
            "support.misuse:different_calls", (how,), ranks=2, folder=RunFolder(tmp_path), hang_seconds=300
        )
    told = f"{failed.value} {failed.value.details}"
    assert all(word in told for word in words), told
    assert time.monotonic() - began < 100  # the ranks' own deadline is 150 s
