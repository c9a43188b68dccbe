"""Numbers in shared memory that the ranks of one node count up and wait for.

Every rank owns one line: a few counters that only it writes, so that plain stores are enough. A rank that has to
wait sleeps on the counter it waits for, and looks now and then whether that counter's owner still lives.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import time
from collections.abc import Callable, Sequence

import numpy

from dure.base.errors import PeerLost
from dure.comm.futex import Futex

_LINE = 64
"""Bytes between two ranks' counters: a cache line, so that waiting ranks do not disturb the others."""
_LOOK_SECONDS = 0.2
"""How often a sleeping rank looks whether the peer it waits for still lives."""
_SPIN_SECONDS = 30e-6
"""How long a rank looks before it sleeps, where every rank has a core of its own."""


def line_bytes(ranks: int) -> int:
    """The room that the counters of so many ranks take."""
    return _LINE * ranks


class ShmCounters:
    """All ranks' counters, at most 16 a rank. Each counter is counted by one thread."""

    def __init__(self, shared: mmap.mmap, rank: int, pids: Sequence[int], deadline_seconds: float) -> None:
        """`shared` begins with the ranks' lines, zeroed; `pids` are the ranks' processes, in rank order."""
        self.rank = rank
        self.size = len(pids)
        self._pids = pids
        self._deadline_seconds = deadline_seconds
        lines = numpy.frombuffer(shared, numpy.int32, line_bytes(self.size) // 4)
        self.values = lines.reshape(self.size, _LINE // 4)
        """By rank, then by counter."""
        base = ctypes.addressof(ctypes.c_char.from_buffer(shared))
        self._lines = [base + _LINE * rank for rank in range(self.size)]
        self._futex = Futex()
        self._lives = [os.pidfd_open(pid) for pid in pids]
        self._spins = len(os.sched_getaffinity(0)) >= self.size

    def set(self, counter: int, value: int) -> None:
        """Count this rank's own counter up to a value, and wake who waits for it."""
        self.values[self.rank, counter] = value
        self.wake(counter)

    def wake(self, counter: int) -> None:
        """Have everyone who waits for a counter of this rank look again."""
        self._futex.wake(self._lines[self.rank] + 4 * counter)

    def wait(
        self, peer: int, counter: int, value: int, what: str, look: Callable[[], None] | None = None
    ) -> None:
        """Return when a peer's counter has reached a value; raises PeerLost if the peer is dead or late.

        `look` is called each time that this rank wakes in vain; what it raises ends the wait.
        """
        values = self.values[:, counter]
        if self._spins:
            until = time.perf_counter() + _SPIN_SECONDS
            while time.perf_counter() < until:
                if values[peer] >= value:
                    return
        address = self._lines[peer] + 4 * counter
        deadline = time.monotonic() + self._deadline_seconds
        while (seen := int(values[peer])) < value:
            self._futex.wait(address, seen, _LOOK_SECONDS)
            if int(values[peer]) >= value:
                return
            if look is not None:
                look()
            # Looked at again: since the look above it may have counted, and then ended as it should.
            if self._is_dead(peer) and int(values[peer]) < value:
                raise PeerLost(
                    f"rank {self.rank} lost rank {peer} in {what}: process {self._pids[peer]} is gone"
                )
            if time.monotonic() > deadline:
                raise PeerLost(
                    f"rank {self.rank} waited {self._deadline_seconds:.0f} s for rank {peer} in {what}; it lives, "
                    f"but never came"
                )

    def _is_dead(self, peer: int) -> bool:
        poll = select.poll()
        poll.register(self._lives[peer], select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Let go of the descriptors."""
        for descriptor in self._lives:
            os.close(descriptor)
