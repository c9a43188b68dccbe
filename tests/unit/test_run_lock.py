"""Nobody trains in a run folder where somebody trains already; a launcher that is gone is in nobody's way."""

import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
from support.commands import dure

from dure.base.errors import UsageError
from dure.base.run_folder import RunFolder
from dure.launch.run_lock import RunLock

HOLD = """
import sys, time
from pathlib import Path
from dure.launch.run_lock import RunLock
from dure.base.run_folder import RunFolder
with RunLock(RunFolder(Path(sys.argv[1]))):
    print("claimed", flush=True)
    time.sleep(600)
"""

JOB = """
[model]
factory = "net.py:model"
[data]
factory = "net.py:data"
global_batch = 4
[train]
steps = 1
"""


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


@pytest.fixture
def holder(folder):
    """Another process that has claimed the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, folder.path], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "claimed\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_launch_that_may_wait_takes_the_folder_over_when_the_other_has_ended(folder, holder):
    """A leader that was cut off and ends by itself, and the next one, which is started meanwhile."""
    threading.Timer(0.5, holder.kill).start()
    with RunLock(folder, wait_seconds=60.0):
        assert holder.wait(60) == -signal.SIGKILL


def test_a_claimed_folder_is_refused_with_who_holds_it(folder, holder):
    words = rf"is in use: process {holder.pid} on {socket.gethostname()} .*--run-dir"
    with pytest.raises(UsageError, match=words), RunLock(folder):
        pytest.fail("two at once")


def test_a_launcher_that_was_killed_holds_nothing(folder, holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with RunLock(folder):
        pass
    with RunLock(folder):  # and one that ended well holds nothing either
        pass


@pytest.mark.parametrize("fresh", [(), ("--fresh",)])
def test_dure_train_neither_joins_nor_moves_a_run_that_is_going_on(tmp_path, folder, holder, fresh):
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    folder.job.write_text("{}")
    ended = dure("train", job, "--run-dir", folder.path, *fresh)
    assert ended.code == 2
    assert f"process {holder.pid} on " in ended.err
    assert folder.job.read_text() == "{}", "it must not be touched"


def test_a_folder_without_locks_is_told_and_used(folder, monkeypatch, capsys):
    def no_locks(descriptor, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("dure.launch.run_lock.fcntl.flock", no_locks)
    with RunLock(folder):
        pass
    assert "without locks (No locks available)" in capsys.readouterr().err
