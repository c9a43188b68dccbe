"""Where each rank is right now: a few bytes in a mapped file that others read without the rank's help.

A rank that is stopped, holds the GIL or is dead cannot answer questions, but its last beat still stands in
the file. A beat is one store into mapped memory: no system call, no lock, about a microsecond.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from dure.base.files import open_own, read_at_most


class Phase(IntEnum):
    """What a rank does. The numbers stand in files: add new ones at the end."""

    STARTING = 0
    LOADING = 1
    DATA = 2
    COMPUTE = 3
    EXCHANGE = 4
    """Waiting for the others: the one phase in which standing still is somebody else's fault."""
    UPDATE = 5
    PROVE = 6
    EVALUATE = 7
    DONE = 8
    SAVE = 9


@dataclass(frozen=True)
class Beat:
    """The last that a rank said of itself."""

    step: int
    phase: Phase
    at_ns: int
    """CLOCK_MONOTONIC: comparable on the same host only."""
    pid: int


# Every beat is written twice. A reader that meets a half-written one sees two that differ, and reads again.
_BEAT = struct.Struct("<qqqq")
_TWICE = struct.Struct("<qqqqqqqq")
_BYTES = _TWICE.size


class Heartbeat:
    """The writing side, in a rank. Without a path, or without room on the disk, beats go nowhere."""

    def __init__(self, path: Path | None) -> None:
        self._map = _reserve(path) if path is not None else None
        self._pid = os.getpid()
        self._last = (0, Phase.STARTING)

    @property
    def kept(self) -> bool:
        """Whether beats can be seen by others."""
        return self._map is not None

    @property
    def last(self) -> tuple[int, Phase]:
        """Where this rank said that it is."""
        return self._last

    def beat(self, step: int, phase: Phase) -> None:
        """Say where this rank is now."""
        self._last = (step, phase)
        if self._map is not None:
            now, pid = time.monotonic_ns(), self._pid
            _TWICE.pack_into(self._map, 0, step, phase, now, pid, step, phase, now, pid)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Within `with`, this rank only waits for the others; then it goes on with what it did."""
        step, phase = self._last
        self.beat(step, Phase.EXCHANGE)
        yield
        self.beat(step, phase)

    def close(self) -> None:
        """Unmap the file; the last beat stays in it, later beats go nowhere."""
        if self._map is not None:
            self._map.close()
            self._map = None


def read_beat(path: Path) -> Beat | None:
    """Return the last beat in `path`; None when there is none, or when none could be read whole."""
    for _ in range(3):
        try:
            data = read_at_most(path, _BYTES)
        except OSError:
            return None
        if len(data) != _BYTES:
            return None
        first, second = data[: _BEAT.size], data[_BEAT.size :]
        if first == second:
            step, phase, at_ns, pid = _BEAT.unpack(first)
            known = at_ns != 0 and phase in Phase.__members__.values()
            return Beat(step, Phase(phase), at_ns, pid) if known else None
    return None


def _reserve(path: Path) -> mmap.mmap | None:
    try:
        descriptor = open_own(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        return None
    try:
        # A store into a hole of a full disk is a SIGBUS; reserving the bytes first makes it an error here.
        os.posix_fallocate(descriptor, 0, _BYTES)
        return mmap.mmap(descriptor, _BYTES)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
