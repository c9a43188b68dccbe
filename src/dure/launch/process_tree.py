"""Processes that do not outlive the ones they belong to (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with(parent: int) -> None:
    """Have the kernel kill this process when `parent` ends; end now if it already has.

    The kernel watches the *thread* that made this process: make processes from the main thread.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended between the fork and the line above
        os._exit(1)


def outlive_parent() -> None:
    """Undo `die_with`."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that none can get lost."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """Return the direct children of this process (of its only thread)."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:  # a kernel built without CONFIG_PROC_CHILDREN
        return []


def descendants() -> list[int]:
    """Return the children of this process, theirs, and so on."""
    found: list[int] = []
    to_visit = [os.getpid()]
    while to_visit:
        pid = to_visit.pop()
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for thread in os.listdir(f"/proc/{pid}/task"):  # a child belongs to the thread that made it
                with open(f"/proc/{pid}/task/{thread}/children") as file:
                    theirs = [int(child) for child in file.read().split()]
                found += theirs
                to_visit += theirs
    return found


def numbers_in_use() -> set[int]:
    """Return the numbers of all processes, also those that they have in namespaces below this one."""
    numbers: set[int] = set()
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            numbers.add(int(entry))
            with contextlib.suppress(OSError), open(f"/proc/{entry}/status") as file:
                for line in file:
                    if line.startswith("NSpid:"):
                        numbers.update(map(int, line.split()[1:]))
    return numbers


def began_at() -> float:
    """When this process began, as `time.time` counts."""
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def state(pid: int) -> str:
    """Return the kernel's letter for what a process does (R, S, D, T, Z…), "" when it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    try:
        with open(f"/proc/{pid}/status") as file:
            masks = dict(line.split(":", 1) for line in file if line.startswith("SigCgt"))
        return bool(int(masks["SigCgt"], 16) >> (number - 1) & 1)
    except (OSError, KeyError, ValueError):
        return False


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")
