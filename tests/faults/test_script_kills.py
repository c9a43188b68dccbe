"""Whoever is killed while a script trains: it goes on, and comes to the same bits. A script with files of its own is
started again as under torchrun."""

import os
import random
import signal

import pytest
from support import FOLDER
from support.leftovers import all_gone, wait_until
from support.script_runs import ScriptRun, alone

from dure.base.team_key import make_key_file
from dure.observe.heartbeat import read_beat
from dure.tools.bench.ports import free_ports

STEPS = 24


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    path = tmp_path_factory.mktemp("alone")
    code, said, found = alone(path / "out.json", "--folder", path / "saved")
    assert code == 0, said
    return found


def kill(run, pids, whom):
    """Kill one rank, all of them, or the launcher, whose ranks the kernel then ends."""
    victims = {"rank": pids[-1:], "all": pids, "launcher": [run.process.pid]}[whom]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    if whom == "launcher":
        run.process.communicate(timeout=60)
        all_gone(pids)


def train_and_kill(run, kills, chance):
    """Kill at random moments, and start again, on another number of ranks, whenever the launcher was killed; returns
    how it ended and how many were killed how."""
    step, dead, done = 0, set(), []
    ranks = chance.choice((1, 2, 3))
    run.start(ranks, "--nap", "0.04")
    for at in range(kills):
        step = min(step + chance.randint(1, max(2, STEPS // kills)), STEPS - 4)
        pids = run.wait_for_step(ranks, step, dead)
        dead |= set(pids)
        whom = (
            ("rank", "all", "launcher")[at % 3] if kills < 6 else chance.choice(("rank", "all", "launcher"))
        )
        kill(run, pids, whom)
        done.append(whom)
        if whom == "launcher":
            ranks = chance.choice([other for other in (1, 2, 3) if other != ranks])
            run.start(ranks, "--nap", "0.04")
    return run.end(), done


@pytest.mark.parametrize(
    ("seed", "kills"),
    [
        (1, 4),
        *(pytest.param(seed, 5, marks=[pytest.mark.soak, pytest.mark.timeout(900)]) for seed in range(2, 6)),
    ],
)
def test_a_script_killed_at_random_moments_on_changing_numbers_of_ranks_keeps_its_bits(
    undisturbed, tmp_path, seed, kills
):
    run = ScriptRun(tmp_path / "run")
    try:
        (code, said, found), done = train_and_kill(run, kills, random.Random(seed))
    finally:
        run.clear()
    assert code == 0, said
    assert found == undisturbed
    assert len(done) == kills
    assert {"rank", "all", "launcher"} <= set(done)


def test_a_killed_rank_costs_no_more_than_a_step_as_states_are_kept_in_memory(undisturbed, tmp_path):
    run = ScriptRun(tmp_path / "run")
    try:
        run.start(2, "--nap", "0.04", "--every", 1000, "--memory-every", 1)
        kill(run, run.wait_for_step(2, 12), "rank")
        code, said, found = run.end()
    finally:
        run.clear()
    assert (code, found) == (0, undisturbed), said
    (restart,) = run.restarts()
    assert (restart["rank"], restart["max_restarts"]) == (1, 3)
    assert "all ranks start again (restart 1 of 3 without progress): rank 1" in said
    began = int(said.split("goes on from step ")[1].split()[0])
    assert restart["step"] - 2 <= began <= restart["step"] + 1, "nothing was saved in storage by then"


@pytest.mark.soak  # a busy machine would take a node that imports torch for lost
def test_a_script_on_two_nodes_is_started_again_on_both_by_the_leader(undisturbed, tmp_path):
    key, port = tmp_path / "key", free_ports(1)[0]
    make_key_file(key)
    nodes = [ScriptRun(tmp_path / f"node-{node}") for node in range(2)]
    try:
        for node, run in enumerate(nodes):
            place = ["--nodes", 2, "--node-rank", node, "--leader", f"127.0.0.1:{port}", "--team-key", key]
            run.start(1, "--nap", "0.05", "--folder", tmp_path / "saved", own=place)
        victim = wait_until(lambda: beat_from(nodes[1].folder.heartbeat(1), 8), "step 8", 300)
        os.kill(victim.pid, signal.SIGKILL)
        (code, said, found), (other, _, _) = [run.end() for run in nodes]
    finally:
        for run in nodes:
            run.clear()
    assert (code, other, found) == (0, 0, undisturbed), said
    assert "all ranks start again (restart 1 of 3 without progress): rank 1 on" in said
    assert "began at 0" not in said.split("start again")[1]


def beat_from(path, step):
    beat = read_beat(path)
    return beat if beat is not None and beat.step >= step else None


def test_a_stock_script_is_started_again_as_under_torchrun_and_goes_on_from_its_own_file(tmp_path):
    run = ScriptRun(tmp_path / "run", FOLDER / "torch_save.py")
    try:
        run.start(2, own=["--max-restarts", 3])
        code, said, found = run.end()
    finally:
        run.clear()
    assert code == 0, said
    assert found == {"restarts": 2, "first": 6, "most": "3"}
    killed, mistaken = run.restarts()
    assert "SIGKILL" in killed["cause"]
    assert "a mistake of its own" in mistaken["cause"]
    assert "all ranks start again (restart 2 of 3): " in said


def test_a_stock_script_is_started_again_no_more_often_than_asked(tmp_path):
    run = ScriptRun(tmp_path / "run", FOLDER / "torch_save.py")
    try:
        run.start(2, "hopeless", own=["--max-restarts", 1])
        code, said, found = run.end()
    finally:
        run.clear()
    assert (code, found) == (1, None)
    assert len(run.restarts()) == 1
    assert "sys.exit(5) The team was started again once and failed again." in said.splitlines()[-1]


def test_a_rank_that_stands_still_is_named_with_its_stacks(tmp_path):
    run = ScriptRun(tmp_path / "run", FOLDER / "standing_still.py")
    try:
        run.start(2, own=["--hang-seconds", 4])
        code, said, _ = run.end()
    finally:
        run.clear()
    assert code == 1
    assert "rank 1 has been in COMPUTE of step 5" in said.splitlines()[-1]
    assert "in stand_still" in run.folder.stacks(1).read_text()
