"""Numbers in shared memory that the ranks of one node count up and wait for.

Every rank owns one line: a few counters that only it writes, so that plain stores are enough. A rank that has to
wait sleeps on the counter it waits for, and looks now and then whether that counter's owner still lives.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import time
from collections.abc import Callable

import numpy

from dure.errors import PeerLost
from dure.exchange.futex import Futex
from dure.exchange.group import Group
from dure.exchange.segment import Offer, Segment, map_offer

_LINE = 64
"""Bytes between two ranks' counters: a cache line, so that waiting ranks do not disturb the others."""
_LOOK_SECONDS = 0.2
"""How often a sleeping rank looks whether the peer it waits for still lives."""
_SPIN_SECONDS = 30e-6
"""How long a rank looks before it sleeps, where every rank has a core of its own."""


class Counters:
    """All ranks' counters, at most 16 a rank. Each counter is counted by one thread."""

    def __init__(self, group: Group, deadline_seconds: float, extra_bytes: int = 0) -> None:
        """Make or map the lines, and so many bytes after them; `group` are the ranks of this node."""
        self.rank = group.rank
        self.size = group.size
        self._deadline_seconds = deadline_seconds
        self.lines_bytes = _LINE * self.size
        self._own = Segment(self.lines_bytes + extra_bytes) if self.rank == 0 else None
        offer = self._own.offer().as_list() if self._own is not None else []
        told = group.gather(json.dumps([os.getpid(), offer]), "meeting in shared memory")
        everyones = [json.loads(text) for text in told]
        self._pids = [pid for pid, _ in everyones]
        self.map: mmap.mmap = self._own.bytes if self._own is not None else map_offer(Offer(*everyones[0][1]))
        lines = numpy.frombuffer(self.map, numpy.int32, self.lines_bytes // 4)
        self.values = lines.reshape(self.size, _LINE // 4)
        """By rank, then by counter."""
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self._lines = [base + _LINE * rank for rank in range(self.size)]
        self._futex = Futex()
        self._lives = [os.pidfd_open(pid) for pid in self._pids]
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
            if self._is_dead(peer):
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
        """Let go of the descriptors; the memory lives as long as somebody looks at it."""
        for descriptor in self._lives:
            os.close(descriptor)
        if self._own is not None:
            self._own.close()
