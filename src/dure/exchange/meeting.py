"""Where the ranks of one node meet: a barrier on shared memory, and a board for a few numbers.

Every rank owns one line of the board: a counter of the meetings it came to, and its numbers. A meeting is
over for a rank when every counter has reached its own. Each counter has one writer, so that plain stores
are enough; a rank that has to wait sleeps on the counter it waits for.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import time

import numpy

from dure.errors import PeerLost
from dure.exchange.futex import Futex
from dure.exchange.group import Group
from dure.exchange.segment import Offer, Segment, map_offer

_LINE = 64
"""Bytes between two counters: a cache line, so that waiting ranks do not disturb the others."""
_LOOK_SECONDS = 0.2
"""How often a sleeping rank looks whether the peer it waits for still lives."""
_SPIN_SECONDS = 30e-6
"""How long a rank looks before it sleeps, where every rank has a core of its own."""


class Meeting:
    """This rank's place at the board. One thread uses it."""

    def __init__(self, group: Group, numbers: int, deadline_seconds: float) -> None:
        """Make or map the board; `group` are the ranks of this node, `numbers` the room of each."""
        self.rank = group.rank
        self.size = group.size
        self._deadline_seconds = deadline_seconds
        nbytes = _LINE * self.size + 8 * numbers * self.size
        self._own = Segment(nbytes) if self.rank == 0 else None
        offer = self._own.offer().as_list() if self._own is not None else []
        told = group.gather(json.dumps([os.getpid(), offer]), "meeting in shared memory")
        everyones = [json.loads(text) for text in told]
        self._pids = [pid for pid, _ in everyones]
        self._map: mmap.mmap = (
            self._own.bytes if self._own is not None else map_offer(Offer(*everyones[0][1]))
        )
        self._counters = numpy.frombuffer(self._map, numpy.int32, _LINE * self.size // 4)[:: _LINE // 4]
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._addresses = [base + _LINE * rank for rank in range(self.size)]
        numbers_part = numpy.frombuffer(self._map, numpy.float64, numbers * self.size, _LINE * self.size)
        self.board = numbers_part.reshape(self.size, numbers)
        """One row of numbers a rank; written before a meeting, read after it."""
        self._futex = Futex()
        self._lives = [os.pidfd_open(pid) for pid in self._pids]
        self._came = 0
        self._spins = len(os.sched_getaffinity(0)) >= self.size

    def meet(self, what: str) -> None:
        """Return when all ranks have come; raises PeerLost, naming who did not, if one is dead or late."""
        self._came += 1
        came = self._came
        counters = self._counters
        counters[self.rank] = came
        self._futex.wake(self._addresses[self.rank])
        for peer in range(self.size):
            if counters[peer] < came:
                self._wait_for(peer, came, what)

    def _wait_for(self, peer: int, came: int, what: str) -> None:
        counters = self._counters
        if self._spins:
            until = time.perf_counter() + _SPIN_SECONDS
            while time.perf_counter() < until:
                if counters[peer] >= came:
                    return
        deadline = time.monotonic() + self._deadline_seconds
        while (seen := int(counters[peer])) < came:
            self._futex.wait(self._addresses[peer], seen, _LOOK_SECONDS)
            if int(counters[peer]) >= came:
                return
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
        """Let go of the board's descriptors."""
        for descriptor in self._lives:
            os.close(descriptor)
        if self._own is not None:
            self._own.close()
