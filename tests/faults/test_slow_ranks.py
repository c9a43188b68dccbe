"""A slow evaluation is not a hang; a hang in one is told with who waits for whom."""

import pytest

from dure.base.errors import RankFailed
from dure.base.run_folder import RunFolder
from dure.launch import run_team


@pytest.mark.soak
def test_an_evaluation_longer_than_hang_seconds_is_let_go_on(tmp_path):
    """Each rank reads 20 samples in 0.4 s: 8 s in all, and 1.6 s without a beat."""
    seen = run_team(
        "support.slow_ranks:evaluate", (0.4,), ranks=2, folder=RunFolder(tmp_path), hang_seconds=6
    )
    assert seen == [20, 20]


@pytest.mark.soak
def test_a_rank_that_hangs_in_evaluation_is_named_and_the_others_wait_for_it(tmp_path):
    """Sample 2 is in shard 2, which is rank 1's of 3."""
    with pytest.raises(RankFailed, match=r"^rank 1 has been in EVALUATE.*ranks 0, 2 wait for it") as failed:
        run_team("support.slow_ranks:evaluate", (0.0, 2), ranks=3, folder=RunFolder(tmp_path), hang_seconds=5)
    assert failed.value.rank == 1
