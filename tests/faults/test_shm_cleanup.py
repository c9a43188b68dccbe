"""Shared memory that a killed process of ours left is removed; nobody else's is."""

import os
import subprocess
import sys
import time

import pytest
from support import littering

from dure.base.errors import RankFailed
from dure.base.run_folder import RunFolder
from dure.launch import run_team
from dure.launch.preload import TORCH
from dure.launch.shm_cleanup import LOOK_SECONDS, ShmCleanup

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a process namespace")
sweeps = pytest.mark.skipif(
    os.stat("/proc/self/ns/pid").st_ino != 0xEFFFFFFC, reason="in a container nothing is removed"
)


def run(tmp_path, who, **options):
    return run_team(
        "support.littering:litter",
        (tmp_path, who, 1),
        ranks=2,
        folder=RunFolder(tmp_path / "run"),
        hang_seconds=60,
        preload=TORCH,
        **options,
    )


@sweeps
@pytest.mark.parametrize("who", ["worker", "rank"])
def test_a_team_that_re_forms_finds_nothing_of_what_killed_processes_left(tmp_path, who):
    told = []
    assert run(tmp_path, who, max_restarts=1, on_restart=told.append) == [[], []]
    assert ("SIGXFSZ" if who == "rank" else "SIGKILL") in told[0].cause
    assert littering.left_by((tmp_path / f"left-{who}").read_text()) == []


@sweeps
def test_at_the_end_nothing_is_left_but_what_is_not_ours(tmp_path):
    others = [littering.SHM / f"torch_{pid}_1_1" for pid in (os.getpid(), dead_process())]
    for path in others:
        path.touch(0o600)
    try:
        with pytest.raises(RankFailed, match="SIGKILL"):
            run(tmp_path, "worker")
        assert littering.left_by((tmp_path / "left-worker").read_text()) == []
        assert all(path.exists() for path in others)
    finally:
        for path in others:
            path.unlink()


def dead_process():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def leave(folder, pid):
    path = folder / f"torch_{pid}_123_0"
    path.touch(0o600)
    return path


@sweeps
def test_only_files_of_dead_processes_that_were_seen_are_removed(tmp_path):
    shm_cleanup = ShmCleanup(tmp_path)
    ours, unseen = dead_process(), dead_process()
    shm_cleanup.saw(ours)
    shm_cleanup.saw(os.getpid())
    left = leave(tmp_path, ours)
    kept = [leave(tmp_path, unseen), leave(tmp_path, os.getpid()), tmp_path / f"torch_{ours}_notes"]
    kept[2].touch()
    assert shm_cleanup.sweep() == [left.name]
    assert sorted(tmp_path.iterdir()) == sorted(kept)


def test_files_from_before_the_launch_are_somebody_elses(tmp_path):
    pid = dead_process()
    left = leave(tmp_path, pid)
    while time.time() < left.stat().st_ctime + 0.1:  # file times are a few milliseconds coarse
        time.sleep(0.02)
    shm_cleanup = ShmCleanup(tmp_path)
    shm_cleanup.saw(pid)
    assert shm_cleanup.sweep() == []
    assert left.exists()


def test_files_from_after_the_end_of_ours_are_of_a_process_that_got_its_number(tmp_path):
    shm_cleanup = ShmCleanup(tmp_path)
    pid = dead_process()
    shm_cleanup.saw(pid)
    time.sleep(2 * LOOK_SECONDS + 0.1)
    left = leave(tmp_path, pid)
    assert shm_cleanup.sweep() == []
    assert left.exists()


@needs_root
def test_another_users_files_are_left_alone(tmp_path):
    shm_cleanup = ShmCleanup(tmp_path)
    pid = dead_process()
    left = leave(tmp_path, pid)
    os.chown(left, 12345, -1)
    shm_cleanup.saw(pid)
    assert shm_cleanup.sweep() == []
    assert left.exists()


@sweeps
@needs_root
def test_a_living_process_of_a_container_with_the_same_number_keeps_its_files(tmp_path):
    number = dead_process()
    inside = f"echo {number - 1} >/proc/sys/kernel/ns_last_pid; sleep 600 & echo $!; wait"
    container = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", inside],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert container.stdout.readline() == f"{number}\n"
        shm_cleanup = ShmCleanup(tmp_path)
        left = leave(tmp_path, number)
        shm_cleanup.saw(number)
        assert shm_cleanup.sweep() == []
        assert left.exists()
    finally:
        container.kill()
        container.communicate(timeout=30)


@sweeps
@needs_root
def test_inside_a_container_nothing_is_removed(tmp_path):
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom dure.launch.shm_cleanup import ShmCleanup\n"
        "litter = ShmCleanup(Path(sys.argv[1]))\npid = os.fork() or os._exit(0)\nos.waitpid(pid, 0)\nlitter.saw(pid)\n"
        "Path(sys.argv[1], f'torch_{pid}_123_0').touch(0o600)\nprint(litter.sweep())"
    )
    ran = {
        name: subprocess.run(
            [*within, sys.executable, "-c", code, tmp_path],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for name, within in {
            "inside": ["unshare", "--pid", "--fork", "--mount-proc"],
            "outside": [],
        }.items()
    }
    assert ran["inside"] == "[]\n"
    assert ran["outside"].startswith("['torch_")
