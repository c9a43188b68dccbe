"""A function runs on every rank, and the first failure is the one that is told."""

import json
import os
import socket

import pytest

from dure.base.errors import RankFailed, UsageError
from dure.base.run_folder import RunFolder
from dure.launch import run_team
from dure.launch.preload import TORCH
from dure.tools.bench.ports import free_ports


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "run")


def run(entry, *args, folder, ranks=2, **options):
    options = {"hang_seconds": 60, "preload": (), **options}
    return run_team(f"support.entries:{entry}", args, ranks=ranks, folder=folder, **options)


def test_values_come_home_in_rank_order_and_output_is_in_each_ranks_log(folder, capfd):
    ticks = []
    values = run(
        "square", 7, folder=folder, ranks=3, threads=2, preload=TORCH, on_tick=lambda: ticks.append(1)
    )
    assert values == [(rank, 49, 2, "2", os.getcwd()) for rank in range(3)]
    for rank in range(3):
        assert folder.log(rank).read_text() == f"rank {rank} squares 7\nto stderr\n"
    assert capfd.readouterr() == ("", "")
    assert ticks
    assert list(folder.stacks(0).parent.iterdir()) == []


def test_teed_output_is_on_the_console_too(folder, capfd):
    run("square", 7, folder=folder, tee=True, preload=TORCH)
    captured = capfd.readouterr()
    assert sorted(captured.out.splitlines()) == ["rank 0 squares 7", "rank 1 squares 7"]
    assert captured.err.splitlines() == ["to stderr"] * 2
    assert sorted(folder.log(1).read_text().splitlines()) == ["rank 1 squares 7", "to stderr"]


def test_large_values_come_home_whole(folder):
    assert run("big", folder=folder) == [bytes([rank]) * (3 << 20) for rank in range(2)]


def test_the_order_of_a_set_of_words_is_the_same_on_all_ranks_and_at_every_start(folder, monkeypatch):
    found = []
    for seed in ("1", "random"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        found += run("in_order_of_a_set", folder=folder)
    assert found == [found[0]] * 4


def test_ranks_meet_through_the_agents_store(folder):
    assert run("all_reduce", folder=folder, ranks=4, preload=TORCH) == [6.0] * 4


def test_the_rank_that_raised_is_the_cause_not_those_that_waited_for_it(folder):
    with pytest.raises(RankFailed) as failure:
        run("raise_while_others_wait", 2, folder=folder, ranks=4, preload=TORCH)
    assert failure.value.rank == 2
    assert failure.value.host == socket.gethostname()
    assert str(failure.value).endswith("failed: ValueError: the cause")
    assert failure.value.details.startswith("Traceback")
    assert "raise_while_others_wait" in failure.value.details
    assert "dure/launch" not in failure.value.details
    written = json.loads(folder.error(2).read_text())
    assert (written["rank"], written["type"]) == (2, "ValueError")


@pytest.mark.parametrize(
    ("kind", "code", "message"), [("job", 2, "data.n is 0; use 1."), ("differ", 3, "differ")]
)
def test_our_own_errors_keep_their_exit_code(folder, kind, code, message):
    with pytest.raises(RankFailed, match=message) as failure:
        run("raise_ours", kind, folder=folder)
    assert (failure.value.exit_code, failure.value.rank, failure.value.details) == (code, 1, "")


@pytest.mark.parametrize(
    ("code", "hard", "words"),
    [(3, False, r"sys.exit\(3\)"), (3, True, "exit code 3"), (0, True, "exit code 0 and without a word")],
)
def test_a_rank_that_leaves_early_is_told(folder, code, hard, words):
    with pytest.raises(RankFailed, match=words) as failure:
        run("exit_with", code, hard, folder=folder)
    assert failure.value.rank == 1


def test_a_crash_leaves_its_stack_in_the_log(folder):
    with pytest.raises(RankFailed, match="killed by SIGSEGV") as failure:
        run("crash", folder=folder)
    assert failure.value.rank == 1
    assert "in crash" in failure.value.details
    assert "in crash" in folder.log(1).read_text()


def test_a_value_that_cannot_be_sent_home_is_told(folder):
    with pytest.raises(RankFailed, match="cannot pickle"):
        run("unpicklable", folder=folder)


def test_a_function_that_does_not_exist_is_named(folder):
    with pytest.raises(RankFailed, match=r"'support\.entries:missing' names no function"):
        run("missing", folder=folder)


def test_ranks_may_take_a_moment_to_leave(folder):
    assert run("linger", 0.5, folder=folder) == [0, 1]


def test_a_rank_that_returns_but_never_ends_is_told(folder, monkeypatch):
    monkeypatch.setattr("dure.launch.agent._EXIT_SECONDS", 3.0)
    with pytest.raises(
        RankFailed, match=r"rank 1 .* returned, but its process did not end within 3 s"
    ) as failed:
        run("linger", 600, folder=folder)
    assert "in _leave" in failed.value.failure.details


def test_a_rank_whose_model_outlives_its_team_ends(folder):
    """A thread of Gloo's that wants the GIL while the model destroys the group: it never ended."""
    assert run("leave_with_work_under_way", folder=folder) == [0, 1]


def test_a_port_in_use_is_refused_before_anything_starts(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            UsageError, match=f"port {port} .*Address already in use.*another port"
        ) as refused:
            run("square", 1, folder=folder, port=port)
    assert refused.value.exit_code == 2


def test_a_port_that_is_free_is_used(folder):
    (port,) = free_ports(1)
    assert run("all_reduce", folder=folder, port=port, preload=TORCH) == [1.0, 1.0]


def test_a_slow_team_whose_pulse_moves_is_left_alone(folder):
    steps = run("beat_slowly", folder, 5.0, folder=folder, hang_seconds=4)
    assert min(steps) > 3


def test_an_earlier_runs_errors_are_gone(folder):
    with pytest.raises(RankFailed):
        run("exit_with", 3, False, folder=folder)
    assert folder.error(1).exists()
    assert run("exit_with", 0, False, folder=folder) == ["fine", None]
    assert not folder.error(1).exists()
