"""A team is started again when that may help, and not for ever."""

from dataclasses import replace

import pytest

from dure.base.errors import Failure, JobError, PeerLost, RankFailed, ReplicasDiffer, StorageError
from dure.launch.failure import may_pass
from dure.launch.restart_policy import RestartPolicy, UnsavedScript


def failure(words, may_pass=True):
    return Failure(words, rank=1, host="here", details=f"details of {words}", may_pass=may_pass)


def test_restarts_without_progress_are_counted_and_the_first_cause_is_told():
    restart_policy = RestartPolicy(2, ranks=4)
    assert restart_policy.after(failure("first."), 7).without_progress == 1
    assert restart_policy.after(failure("second."), 7).without_progress == 2
    with pytest.raises(RankFailed, match=r"^first\. The team was started again 2 times .* step 7") as ended:
        restart_policy.after(failure("third."), 7)
    assert ended.value.details == "details of first."


def test_progress_renews_patience():
    restart_policy = RestartPolicy(1, ranks=4)
    for step in range(10):
        restart = restart_policy.after(failure(f"at {step}"), step)
        assert (restart.number, restart.without_progress, restart.step) == (step + 1, 1, step)


def test_a_step_back_is_no_progress():
    restart_policy = RestartPolicy(1, ranks=4)
    restart_policy.after(failure("first."), 7)
    with pytest.raises(RankFailed, match="first"):
        restart_policy.after(failure("second."), 6)


def test_what_cannot_pass_ends_the_run_with_its_own_words():
    restart_policy = RestartPolicy(3, ranks=4)
    restart_policy.after(failure("bad luck"), 7)
    with pytest.raises(RankFailed, match=r"^a bug$"):
        restart_policy.after(failure("a bug", may_pass=False), 9)


def test_without_patience_the_failure_is_told_as_it_is():
    with pytest.raises(RankFailed, match=r"^first\.$"):
        RestartPolicy(0, ranks=4).after(failure("first."), 0)


def test_a_team_that_may_be_smaller_goes_on_with_one_rank_less_until_it_gets_further():
    restart_policy = RestartPolicy(2, ranks=4, min_ranks=2)
    assert [restart_policy.after(failure("first."), 7).ranks for _ in range(4)] == [4, 4, 3, 2]
    with pytest.raises(RankFailed, match=r"^first\."):
        restart_policy.after(failure("fifth."), 7)


def test_progress_of_a_smaller_team_renews_its_patience_and_it_stays_as_small():
    restart_policy = RestartPolicy(1, ranks=4, min_ranks=1)
    assert [restart_policy.after(failure("here"), 7).ranks for _ in range(2)] == [4, 3]
    assert [restart_policy.after(failure("there"), 8).ranks for _ in range(3)] == [3, 2, 1]
    with pytest.raises(RankFailed, match=r"^there"):
        restart_policy.after(failure("again"), 8)


def test_a_script_is_started_again_after_anything_until_it_saves_and_then_like_a_job():
    saving = []
    restart_policy = RestartPolicy(3, ranks=2, script=UnsavedScript(lambda: bool(saving), 1))
    mistake = failure("a bug.", may_pass=False)
    restart = restart_policy.after(mistake, -1)
    assert (restart.without_progress, restart.max_restarts) == (1, 1)
    with pytest.raises(RankFailed, match=r"^a bug\. The team was started again once and failed again\.$"):
        restart_policy.after(failure("killed."), -1)
    saving.append(True)
    restart = restart_policy.after(failure("killed."), 4)
    assert (restart.number, restart.without_progress, restart.max_restarts) == (2, 1, 3)
    with pytest.raises(RankFailed, match=r"^a bug\.$"):
        restart_policy.after(mistake, 4)


def test_a_script_that_nobody_asked_to_start_again_is_not():
    restart_policy = RestartPolicy(3, ranks=2, script=UnsavedScript(lambda: False, 0))
    with pytest.raises(RankFailed, match=r"^killed\.$"):
        restart_policy.after(failure("killed."), -1)


class OutOfMemoryError(RuntimeError):
    """By torch's name."""


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (OSError(5, "Input/output error"), True),
        (MemoryError(), True),
        (OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), True),
        (StorageError("the bucket answers 503"), True),
        (PeerLost("rank 1 never came"), True),
        (ConnectionResetError("gone"), True),
        (ValueError("a bug"), False),
        (RuntimeError("shapes do not fit"), False),
        (FileNotFoundError(2, "no such file"), False),
        (JobError("data.n is 0"), False),
        (ReplicasDiffer("ranks 0 and 1"), False),
        (SystemExit(3), False),
    ],
)
def test_only_the_machines_failures_may_pass(error, passes):
    assert may_pass(error) is passes


def test_a_rank_that_computes_wrongly_is_left_out_as_long_as_the_team_may_be_smaller():
    wrong = replace(failure("rank 1 computes wrongly", may_pass=False), excludes=True)
    restart_policy = RestartPolicy(3, ranks=4, min_ranks=3)
    restart = restart_policy.after(wrong, 7)
    assert (restart.ranks, restart.number, restart.without_progress) == (3, 1, 0)
    with pytest.raises(RankFailed, match="computes wrongly"):
        restart_policy.after(wrong, 9)
    for fixed in (RestartPolicy(3, ranks=4), RestartPolicy(0, ranks=4, min_ranks=1)):
        with pytest.raises(RankFailed, match="computes wrongly"):
            fixed.after(wrong, 7)
