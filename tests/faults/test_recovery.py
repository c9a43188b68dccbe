"""Whoever is killed while a job trains: it goes on by itself, and the weights are the same bits."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from support import FOLDER
from support.alone import train_alone
from support.commands import EXAMPLES, dure

from dure.base.run_folder import RunFolder
from dure.observe.events import TeamFormed, read_events
from dure.observe.heartbeat import read_beat
from dure.tools.drill.faults import FAULTS

SHORT = ["--set", "train.epochs=2"]  # 20 steps


@pytest.fixture(scope="module")
def job(storage, tmp_path_factory):
    path = tmp_path_factory.mktemp("job") / "cats.toml"
    text = (EXAMPLES / "cats.toml").read_text()
    path.write_text(
        text.replace('storage = "../shared"', f'storage = "{storage}"').replace("ranks = 4", "ranks = 2")
    )
    return path


@pytest.fixture(scope="module")
def undisturbed(job, tmp_path_factory):
    """The weights when nothing happens, from one rank."""
    return train_alone(job, tmp_path_factory.mktemp("runs") / "run", {"train.epochs": "2"}).weights_sha256


def train_and_kill(job, folder, kills, *arguments):
    """Kill rank `victim` when it is in `step` or beyond, for each of `kills`; returns the summary and stderr.

    Steps well before the last: a machine that looks the other way for a moment must not find the run at its end.
    """
    command = [
        sys.executable,
        "-m",
        "dure",
        "train",
        str(job),
        "--run-dir",
        str(folder.path),
        "--json",
        *SHORT,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
    process = subprocess.Popen(
        [*command, *arguments], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    killed = set()
    try:
        deadline = time.monotonic() + 300
        for victim, step in kills:
            while True:
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline
                beat = read_beat(folder.heartbeat(victim))
                if beat is not None and beat.step >= step and beat.pid not in killed:
                    break
                time.sleep(0.002)
            killed.add(beat.pid)
            os.kill(beat.pid, signal.SIGKILL)
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1]), err


@pytest.mark.parametrize("sharded", [pytest.param("false", marks=pytest.mark.soak), "true"])
def test_killed_ranks_change_no_bit_and_every_sample_comes_once(job, undisturbed, tmp_path, sharded):
    folder = RunFolder(tmp_path / "run")
    kills = [(1, 4), (0, 10)]
    summary, err = train_and_kill(job, folder, kills, "--set", f"train.shard_optimizer={sharded}")
    assert summary["weights_sha256"] == undisturbed
    assert summary["ledger"]["exactly_once"] is True
    assert summary["ledger"]["epochs"] == 2
    restarts = [json.loads(line) for line in folder.restarts.read_text().splitlines()]
    assert [restart["rank"] for restart in restarts] == [victim for victim, _ in kills]
    assert err.count("all ranks start again") == 2
    assert "SIGKILL" in err
    for restart, (_, step) in zip(restarts, kills, strict=True):
        assert restart["step"] >= step
    # From memory: nothing was saved in storage before the end.
    gone_on = [line for line in err.splitlines() if "goes on from step" in line]
    assert len(gone_on) == 2


def test_after_a_kill_no_more_steps_are_repeated_than_lie_between_two_states(job, undisturbed, tmp_path):
    folder, every = RunFolder(tmp_path / "run"), 4
    settings = ["--set", f"checkpoint.memory_every={every}", "--set", "checkpoint.every_seconds=0"]
    summary, err = train_and_kill(job, folder, [(1, 6), (0, 10)], *settings)
    assert summary["weights_sha256"] == undisturbed
    restarts = [json.loads(line) for line in folder.restarts.read_text().splitlines()]
    starts = [event.start for event in read_events(folder.events(0)) if isinstance(event, TeamFormed)][1:]
    repeated = [restart["step"] - start for restart, start in zip(restarts, starts, strict=True)]
    assert len(repeated) == 2, err
    assert all(0 <= steps <= every for steps in repeated), repeated
    assert all(start % every == 0 for start in starts), "states are kept at these steps, and at no other"


def test_a_host_that_cannot_keep_all_ranks_alive_goes_on_with_fewer_and_the_same_bits(
    job, undisturbed, tmp_path
):
    folder, frail = RunFolder(tmp_path / "run"), tmp_path / "frail.toml"
    own = f'factory = "{FOLDER}/frail.py:photos"\nargs = {{ sign = "{tmp_path}/sign", '
    frail.write_text(job.read_text().replace('factory = "dure.tools.demo.cats:photos"\nargs = { ', own, 1))
    ended = dure(
        *("train", frail, "--run-dir", folder.path, "--json", "--ranks", "2:4", *SHORT),
        *("--set", "team.max_restarts=1", "--set", "data.workers=0"),
    )
    summary = ended.summary
    assert (summary["ranks"], summary["weights_sha256"]) == (2, undisturbed)
    assert summary["ledger"]["exactly_once"] is True
    restarts = [json.loads(line) for line in folder.restarts.read_text().splitlines()]
    assert [restart["ranks"] for restart in restarts][-2:] == [3, 2]
    assert all(restart["rank"] >= 2 and "SIGKILL" in restart["cause"] for restart in restarts)
    assert "goes on with 2 ranks" in ended.err
    assert "goes on from step" in ended.err, "from memory: nothing was saved before the end"


@pytest.mark.soak
def test_without_any_state_the_run_begins_again_with_the_same_bits(job, undisturbed, tmp_path):
    folder = RunFolder(tmp_path / "run")
    off = ["--set", "checkpoint.memory_every=0", "--set", "checkpoint.every_seconds=0"]
    summary, err = train_and_kill(job, folder, [(1, 6)], *off)
    assert summary["weights_sha256"] == undisturbed
    assert summary["ledger"]["exactly_once"] is True
    assert "goes on from" not in err


@pytest.mark.parametrize(
    "names",
    [
        "kill-rank,truncate-latest",
        pytest.param(",".join(FAULTS), marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
    ],
)
def test_a_drill_disturbs_a_job_and_its_bits_stay(job, tmp_path, names):
    ended = dure(
        *("drill", job, "--faults", names, "--seed", 12, "--json"),
        *("--run-dir", tmp_path / "drill", *SHORT),
        deadline_seconds=850,
    )
    figures = ended.summary
    assert set(figures) == {"weights_sha256", "faults"}
    fields = {"name", "step", "same_bits", "noticed_seconds", "resumed_seconds", "steps_repeated"}
    assert all(set(fault) == fields for fault in figures["faults"])
    assert [fault["name"] for fault in figures["faults"]] == names.split(",")
    for fault in figures["faults"]:
        assert fault["same_bits"] is True, fault
        assert 10 <= fault["step"] < 20
        assert fault["resumed_seconds"] >= 0
        if FAULTS[fault["name"]].restarts:
            assert 0 <= fault["noticed_seconds"] < fault["resumed_seconds"]
            assert fault["steps_repeated"] >= 0
        else:
            assert fault["steps_repeated"] == 0
    stderr = (tmp_path / "drill" / "truncate-latest" / "drill-stderr.txt").read_text()
    assert "cannot be used" in stderr
    assert "goes on from step" in stderr


def test_a_drill_names_the_faults_it_knows(job):
    ended = dure("drill", job, "--faults", "earthquake")
    assert ended.code == 2
    assert "kill-rank, kill-all" in ended.err
