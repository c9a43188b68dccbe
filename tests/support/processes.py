"""Processes of a cluster on this machine: find its own, end them by id, leave others alone."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Sequence

import psutil  # type: ignore[import-untyped]


def find(is_ours: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    """The living processes that `is_ours` says yes to."""
    found = []
    for process in psutil.process_iter():
        # Gone meanwhile, a zombie, or of a kind that not even root may look into: none of ours.
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            if is_ours(process) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def kill_with_children(processes: Sequence[psutil.Process]) -> None:
    """Kill processes and all that descends from them, whatever session or environment it moved to."""
    family = set(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            family.update(process.children(recursive=True))
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def end_daemons(daemons: Sequence[subprocess.Popen[bytes]], deadline_seconds: float) -> None:
    """Ask our own children to end, insist when they do not, and reap them."""
    for daemon in daemons:
        daemon.terminate()
    deadline = time.monotonic() + deadline_seconds
    for daemon in daemons:
        try:
            daemon.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
