"""What a test may leave behind, looked for with patience; what others do on this machine is not taken for its own."""

import contextlib
import os
import time
from pathlib import Path

import psutil

PATIENCE_SECONDS = 60.0
"""Generous: a process that was killed goes when a busy machine gets round to it."""
SHARED_MEMORY = Path("/dev/shm")


def wait_until(condition, what="it", deadline_seconds=PATIENCE_SECONDS):
    """Wait until `condition` returns something true, and return that; `what` says what was waited for."""
    deadline = time.monotonic() + deadline_seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, (
            f"waited {deadline_seconds:g} s for {what() if callable(what) else what}"
        )
        time.sleep(0.02)
    return found


def alive(processes):
    """Those of these processes, or process ids, that run; a zombie that nobody has reaped yet does not."""
    found = []
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(one) if isinstance(one, int) else one
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def all_gone(processes, deadline_seconds=PATIENCE_SECONDS):
    """Wait until all of these processes, or process ids, have ended."""
    wait_until(lambda: not alive(processes), lambda: f"the end of {alive(processes)}", deadline_seconds)


def family():
    """All that descends from this process."""
    return set(psutil.Process().children(recursive=True))


def no_new_family(before):
    """Wait until nobody is there who was not `before`, but for what those (the test Slurm's daemons) start."""

    def new():
        found = []
        for process in family() - before:
            with contextlib.suppress(psutil.NoSuchProcess):
                if not before & set(process.parents()):
                    found.append(process)
        return found

    wait_until(lambda: not new(), lambda: f"the end of {new()}")


def shared_memory():
    """The names in /dev/shm."""
    return set(os.listdir(SHARED_MEMORY))


def no_new_shared_memory(before):
    """Wait until /dev/shm has no name that was not there `before`, but for those that somebody's process uses."""

    def new():
        names = shared_memory() - before
        return names - _names_in_use() if names else names

    wait_until(lambda: not new(), lambda: f"{SHARED_MEMORY} to be as it was, without {sorted(new())}")


def _names_in_use():
    used = set()
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            used.update(line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    used.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return {Path(path).name for path in used if path.startswith(f"{SHARED_MEMORY}/")}
