"""What `ps` and `top` show of a process (Linux): its command line and its name."""

from __future__ import annotations

import ctypes
import os

ROOM = 1024
"""Bytes that a process should have for its title: an argument of such a length makes the room."""
_PR_SET_NAME = 15
_ARG_START, _ARG_END = 45, 46
"""Fields of /proc/self/stat, counted from the one after the name."""


def set_title(title: str, name: str) -> None:
    """Show `title` as this process's command line, cut to the room it has, and `name` (15 bytes) as its name.

    Only what other processes see changes: `sys.argv` and `sys.orig_argv` are copies. Where the kernel does not say
    where the command line is kept, it stays as it was.
    """
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
    try:
        with open("/proc/self/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        with open("/proc/self/cmdline", "rb") as file:
            shown = file.read()
    except OSError:
        return
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    room = end - start
    # Nothing is written where not exactly the command line stands. The kernel shows one page of a title at most.
    if start == 0 or room < 2 or ctypes.string_at(start, room)[: len(shown)] != shown:
        return
    text = title.encode(errors="replace").replace(b"\0", b" ")[: room - 2]
    # A last byte that is not zero tells the kernel that this is one title, which ends at the first zero.
    ctypes.memmove(start, text + bytes(room - 1 - len(text)) + b".", room)


def rank_title(rank: int, size: str, command: list[str]) -> tuple[str, str]:
    """The title and the name of a rank that runs `command`."""
    program = os.path.basename(command[0]) if command else ""
    return f"rank {rank} of {size}: {' '.join(command)}", f"rank{rank} {program}"
