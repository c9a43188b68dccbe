"""A team that lost a rank is started again, from the same prefork server, and nothing of the old one is left."""

import json

import pytest
from support.leftovers import all_gone

from dure.base.errors import RankFailed
from dure.base.run_folder import RunFolder
from dure.launch import run_team
from dure.launch.preload import TORCH


def run(tmp_path, how, *, restarts, max_restarts, ranks=3, hang_seconds=300):
    folder = RunFolder(tmp_path / "run")
    told = []
    try:
        values = run_team(
            "support.entries:fail_until",
            (tmp_path, folder, restarts, how),
            ranks=ranks,
            folder=folder,
            hang_seconds=hang_seconds,
            preload=TORCH,
            max_restarts=max_restarts,
            on_restart=told.append,
        )
    finally:
        all_gone([int(note.read_text()) for note in tmp_path.glob("rank-*")])
    return values, told


@pytest.mark.parametrize("how", ["kill", pytest.param("crash", marks=pytest.mark.soak)])
def test_a_team_re_forms_as_often_as_it_gets_further(tmp_path, how):
    values, told = run(tmp_path, how, restarts=3, max_restarts=1)
    assert values == [(3.0, 3)] * 3
    assert [(restart.number, restart.rank) for restart in told] == [(1, 2), (2, 2), (3, 2)]
    assert all(("SIGKILL" if how == "kill" else "SIGSEGV") in restart.cause for restart in told)
    folder = RunFolder(tmp_path / "run")
    written = [json.loads(line) for line in folder.restarts.read_text().splitlines()]
    assert [line["cause"] for line in written] == [restart.cause for restart in told]
    log = folder.log(0).read_text()  # goes on where the last team's ended
    assert [f"rank 0, restart {again}" in log for again in range(4)] == [True] * 4


def test_a_stopped_rank_is_ended_and_the_team_re_forms(tmp_path):
    values, told = run(tmp_path, "stop", restarts=1, max_restarts=1, hang_seconds=5)
    assert values == [(3.0, 1)] * 3
    assert "rank 2 has been in COMPUTE of step 0" in told[0].cause
    assert "(stopped)" in told[0].cause


def test_without_progress_the_run_ends_with_the_first_cause(tmp_path):
    with pytest.raises(RankFailed, match=r"SIGKILL.*started again 2 times and came no further than step 0"):
        run(tmp_path, "kill without progress", restarts=9, max_restarts=2)
    assert len(list(tmp_path.glob("rank-0-*"))) == 3


def test_a_bug_is_told_at_once(tmp_path):
    with pytest.raises(RankFailed, match=r"ValueError: a bug$"):
        run(tmp_path, "raise", restarts=1, max_restarts=3)
    assert len(list(tmp_path.glob("rank-0-*"))) == 1
