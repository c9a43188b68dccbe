"""Output is never a reason to stop: whatever happens to standard error, standard output or a rank's log, a healthy run
trains on, saves, and ends with what the training deserves."""

import json
import os
import pty
import subprocess
import sys

import pytest
from support import FOLDER
from support.alone import train_alone
from support.commands import dure
from support.disks import fill, needs_root, small_disk

from dure.base.run_folder import RunFolder
from dure.config import load_job, parse_settings

JOB = """
name = "talks"
[model]
factory = "{here}/broken.py:model"
[data]
factory = "{here}/talkative.py:Talks"
global_batch = 16
[train]
lr = 0.01
epochs = 3
[team]
ranks = 2
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    path = tmp_path_factory.mktemp("job") / "job.toml"
    path.write_text(JOB.replace("{here}", str(FOLDER)))
    return path


@pytest.fixture(scope="module")
def undisturbed(job, tmp_path_factory):
    return train_alone(job, tmp_path_factory.mktemp("runs") / "run").weights_sha256


def start(job, folder, *arguments, **streams):
    command = [sys.executable, "-m", "dure", "train", job, "--run-dir", folder, *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
    return subprocess.Popen([*map(str, command)], env=env, **streams)


def is_whole(folder, sha256):
    """The run came to its end: the right weights, and saved."""
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["weights_sha256"] == sha256
    listed = json.loads(dure("checkpoints", folder, "--json").out)["checkpoints"]
    assert [row["verified"] for row in listed] == [True]
    return summary


def test_everything_on_a_full_disk(job, undisturbed, tmp_path):
    with open("/dev/full", "w") as full:
        process = start(job, tmp_path / "run", "--json", stdout=full, stderr=full)
        assert process.wait(300) == 0
    is_whole(tmp_path / "run", undisturbed)


def test_a_pipe_that_was_closed_after_the_first_line(job, undisturbed, tmp_path):
    process = start(job, tmp_path / "run", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert b"dure" in process.stdout.readline()
    process.stdout.close()
    assert process.wait(300) == 0
    is_whole(tmp_path / "run", undisturbed)


@pytest.mark.soak
def test_a_terminal_that_went_away(job, undisturbed, tmp_path):
    ours, theirs = pty.openpty()
    process = start(job, tmp_path / "run", stdout=theirs, stderr=theirs)
    os.close(theirs)
    assert os.read(ours, 10)
    os.close(ours)
    assert process.wait(300) == 0
    is_whole(tmp_path / "run", undisturbed)


def test_standard_streams_that_were_never_open(job, undisturbed, tmp_path):
    """The next file that is opened would take their numbers, and everything that is printed would go into it."""
    shell = f"exec {sys.executable} -m dure train {job} --run-dir {tmp_path / 'run'} <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", shell], timeout=300, check=False).returncode == 0
    is_whole(tmp_path / "run", undisturbed)
    lock = (tmp_path / "run" / "launcher.lock").read_text()
    assert set(json.loads(lock)) == {"host", "pid"}


@needs_root
def test_logs_and_events_on_a_disk_that_fills_up(job, undisturbed, tmp_path):
    """The ranks print more than there is room for; the checkpoints are elsewhere."""
    with small_disk(tmp_path / "run", "400k") as run:
        elsewhere = f"checkpoint.folder={tmp_path / 'saved'}"
        ended = dure(
            *("train", job, "--run-dir", run, "--json", "--set", elsewhere),
            *("--set", "data.args.bytes=100000"),
        )
        assert ended.summary["weights_sha256"] == undisturbed
        assert ended.summary["completely_recorded"] is False
        assert "No space left" in ended.err, (
            "the user is told, though neither log nor events could be written"
        )
        assert [
            row["verified"] for row in json.loads(dure("checkpoints", run, "--json").out)["checkpoints"]
        ] == [True]


@needs_root
def test_a_disk_that_is_full_from_the_start_on(job, undisturbed, tmp_path):
    """No heartbeat, no events: nobody takes ranks for hung that only take their time."""
    settings = [f"checkpoint.folder={tmp_path / 'saved'}", "data.args.seconds=1.6", "team.hang_seconds=1"]
    arguments = [word for setting in settings for word in ("--set", setting)]
    with small_disk(tmp_path / "run", "128k") as run:
        folder = RunFolder(run)
        folder.create()
        fill(run)
        ended = dure("train", job, "--run-dir", run, *arguments)
        assert ended.code == 2
        assert ended.err.splitlines()[-1] == (
            f"dure: cannot write {folder.job}: No space left on device; make room, or give another --run-dir"
        )
        (run / "filler").unlink()
        folder.job.write_text(load_job(job, parse_settings(settings)).to_json())
        fill(run)
        ended = dure("train", job, "--run-dir", run, "--json", *arguments)
        assert ended.summary["weights_sha256"] == undisturbed
        assert "a hang will not be noticed" in ended.err
        assert "cannot record events" in ended.err
        assert "start again" not in ended.err


@pytest.mark.soak
def test_a_log_that_is_a_folder(job, undisturbed, tmp_path):
    (tmp_path / "run" / "logs" / "rank-1.log").mkdir(parents=True)
    ended = dure("train", job, "--run-dir", tmp_path / "run", "--json")
    assert ended.summary["weights_sha256"] == undisturbed
    assert "rank-1.log cannot be written" in ended.err


def test_a_command_whose_result_cannot_be_written_fails_and_says_so(tmp_path):
    command = [sys.executable, "-m", "dure", "--version"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert ended.returncode == 1
    assert ended.stderr == "dure: cannot write the result to standard output: No space left on device\n"
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, ""), "`| head` has seen enough"
