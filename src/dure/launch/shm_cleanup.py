"""Shared memory that a killed process left under a name in `/dev/shm`.

torch makes a file `torch_<pid>_…` there for every tensor that crosses from a data-loader worker to its rank, and for
every bucket of gradients, and takes its name away at once. A process that is killed between the two leaves the name,
and the memory with it, until the machine restarts. Nobody but the maker knows the name before, so it is found
afterwards, by the maker's number; the prefork server does that: it sees
the same `/dev/shm` and process ids as the ranks.

Numbers are no proof by themselves: they come round again, and a container has numbers of its own for processes whose
files may lie in the same `/dev/shm`. What is removed is a file of this user, from a process that was seen among the
ranks' descendants, made before that process was missed; and no living process may have the number, in any namespace.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

from dure.launch import process_tree

LOOK_SECONDS = 1.0
"""How often to look at who is there. What lives shorter than this, and is buried by its own rank, may be missed."""
_TICK_SECONDS = 0.02
"""How much older than it is a new file may seem: file systems stamp with the kernel's last tick."""
_NAME = re.compile(r"torch_(\d+)_\d+_\d+")
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""Its inode, a constant of the kernel's (PROC_PID_INIT_INO)."""


class ShmCleanup:
    """Who may have left shared memory behind, and what of it is there."""

    def __init__(self, folder: Path = Path("/dev/shm")) -> None:
        self._folder = folder
        self._began = time.time() - _TICK_SECONDS
        self._seen: dict[int, float] = {}
        """When each process was last known to be one of ours."""
        self._looked = -LOOK_SECONDS

    def saw(self, pid: int) -> None:
        """Note that a process is one of ours, or was until now."""
        self._seen[pid] = time.time()

    def look(self) -> None:
        """Note all descendants of this process, if the last look was long enough ago."""
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        for pid in process_tree.descendants():
            self.saw(pid)

    def sweep(self) -> list[str]:
        """Remove what dead processes of ours left, and forget them; returns the names. Call it when they have ended."""
        seen, self._seen = self._seen, {}
        if os.stat("/proc/self/ns/pid").st_ino != _INITIAL_PID_NAMESPACE:
            # Another container on the same /dev/shm may have a process of the same number, which cannot be seen here.
            return []
        suspects = {name: pid for name, pid in self._names().items() if pid in seen}
        in_use = process_tree.numbers_in_use() if suspects else set()
        removed = []
        for name, pid in suspects.items():
            if pid in in_use:
                continue
            path = self._folder / name
            with contextlib.suppress(OSError):  # somebody else was faster
                status = path.lstat()
                made_by_it = self._began <= status.st_ctime <= seen[pid] + 2 * LOOK_SECONDS
                if status.st_uid == os.geteuid() and made_by_it:
                    path.unlink()
                    removed.append(name)
        return removed

    def _names(self) -> dict[str, int]:
        try:
            names = os.listdir(self._folder)
        except OSError:
            return {}
        return {name: int(match[1]) for name in names if (match := _NAME.fullmatch(name))}
