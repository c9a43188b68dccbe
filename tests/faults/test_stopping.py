"""A run that was asked to stop: it saves, or it ends soon and says why; it is never started again for that."""

import os
import pty
import select
import signal
import subprocess
import sys
import threading

import psutil
import pytest
from support import FOLDER
from support.leftovers import all_gone, no_new_shared_memory, shared_memory, wait_until

from dure.base.run_folder import RunFolder
from dure.observe.heartbeat import read_beat

JOB = """
name = "endless"
[model]
factory = "{here}/endless.py:model"
args = {{ when = "{spin}" }}
[data]
factory = "{here}/endless.py:data"
global_batch = 8
[train]
steps = 10000000
[team]
ranks = 2
[checkpoint]
every_steps = 5
"""


@pytest.fixture
def run(tmp_path):
    """Start the job; gives the launcher when a checkpoint is there, and looks for leftovers in the end."""
    job, folder = tmp_path / "job.toml", RunFolder(tmp_path / "run")
    job.write_text(JOB.format(here=FOLDER, spin=tmp_path / "spin"))
    shared = shared_memory()
    started = []

    def start(*settings, before=(), **options):
        command = [sys.executable, "-m", "dure", "train", job, "--run-dir", folder.path, "--json"]
        options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, **options}
        process = subprocess.Popen(
            [*before, *map(str, command), *(f"--set={setting}" for setting in settings)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"},
            **options,
        )
        wait_until(lambda: newest(folder) > 0, "a checkpoint", 300)
        started.append((process, psutil.Process(process.pid).children(recursive=True)))
        return process

    yield start, folder
    for process, descendants in started:
        try:
            all_gone([process.pid, *descendants])
        finally:
            process.kill()
            process.communicate(timeout=300)
    no_new_shared_memory(shared)


def newest(folder):
    """The step of the newest checkpoint that is whole."""
    manifests = (folder.path / "checkpoints").glob("step-*/manifest.json")
    return max([int(path.parent.name.split("-")[1]) for path in manifests], default=0)


def step(folder):
    beat = read_beat(folder.heartbeat(0))
    return beat.step if beat is not None else 0


# A rank that is stopped and hangs is also the next test's.
@pytest.mark.parametrize("how", [pytest.param("stopped", marks=pytest.mark.soak), "spins"])
def test_a_team_with_a_stuck_rank_is_ended_by_its_deadline_and_is_resumable(run, tmp_path, how):
    start, folder = run
    process = start("team.hang_seconds=600", "team.stop_seconds=6")
    if how == "stopped":
        os.kill(read_beat(folder.heartbeat(1)).pid, signal.SIGSTOP)
    else:
        (tmp_path / "spin").touch()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 75, err
    last = err.splitlines()[-1]
    assert "has not saved within 6 s (team.stop_seconds)" in last
    assert "rank 1 has been in " in last
    assert "goes on from its newest checkpoint" in last
    assert not folder.restarts.exists()
    assert not folder.stop.exists()


def test_a_team_that_hangs_after_it_was_asked_to_stop_is_not_started_again(run):
    start, folder = run
    process = start("team.hang_seconds=4", "team.stop_seconds=600")
    os.kill(read_beat(folder.heartbeat(1)).pid, signal.SIGSTOP)
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGUSR2)  # nobody's business
    _, err = process.communicate(timeout=300)
    assert process.returncode == 75, err
    assert "rank 1 has been in " in err
    assert "The run was asked to stop, so it is not started again" in err
    assert not folder.restarts.exists()


def test_a_rank_that_dies_after_a_stop_was_asked_by_file_is_not_started_again(run):
    start, folder = run
    process = start("team.hang_seconds=600")
    victim = read_beat(folder.heartbeat(1)).pid
    os.kill(victim, signal.SIGSTOP)  # so that the run cannot save first
    folder.stop.touch()
    os.kill(read_beat(folder.heartbeat(0)).pid, signal.SIGKILL)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 75, err
    assert "killed by SIGKILL" in err
    assert not folder.restarts.exists()


def test_a_closed_terminal_saves_first_and_the_run_is_resumable(run):
    start, folder = run
    ours, theirs = pty.openpty()
    own_terminal = "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
    before = [sys.executable, "-c", f"{own_terminal}; os.execv(sys.argv[1], sys.argv[1:])"]
    closing = threading.Event()

    def show():  # a terminal that nobody looks at would hold up the launcher
        while not closing.is_set():
            if select.select([ours], [], [], 0.05)[0]:
                os.read(ours, 65536)

    shown = threading.Thread(target=show)
    shown.start()
    process = start(before=before, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = step(folder)
    closing.set()
    shown.join()
    os.close(ours)  # the kernel hangs up on the launcher
    process.send_signal(signal.SIGHUP)  # and so does its shell
    assert process.wait(300) == 75
    assert newest(folder) >= seen
    assert not folder.restarts.exists()
