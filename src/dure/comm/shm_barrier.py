"""Where the ranks of one node meet: a barrier on shared memory, and a board for a few numbers.

A barrier is over for a rank when every rank has arrived at as many as itself.
"""

from __future__ import annotations

import json
import mmap
import os

import numpy

from dure.comm.group import Group
from dure.comm.shm_counters import ShmCounters, line_bytes
from dure.comm.shm_segment import Offer, Segment, map_offer

_CAME, _FLAGS = 0, 1
"""Counters of a rank's line: how many barriers it arrived at; then its flags, for odd and for even barriers."""


class ShmBarrier:
    """This rank's place at the board. One thread uses it."""

    def __init__(self, group: Group, numbers: int, deadline_seconds: float) -> None:
        """Make or map the board; `group` are the ranks of this node, `numbers` the room of each."""
        self.rank = group.rank
        self.size = group.size
        start = line_bytes(self.size)
        self._own = Segment(start + 8 * numbers * self.size) if self.rank == 0 else None
        offer = self._own.offer().as_list() if self._own is not None else []
        told = group.gather(json.dumps([os.getpid(), offer]), "joining the barrier in shared memory")
        everyones = [json.loads(text) for text in told]
        shared: mmap.mmap = self._own.bytes if self._own is not None else map_offer(Offer(*everyones[0][1]))
        self._counters = ShmCounters(shared, self.rank, [pid for pid, _ in everyones], deadline_seconds)
        numbers_part = numpy.frombuffer(shared, numpy.float64, numbers * self.size, start)
        self.board = numbers_part.reshape(self.size, numbers)
        """One row of numbers per rank; written before a barrier, read after it."""
        self._all_came = self._counters.values[:, _CAME]
        self._came = 0

    def wait(self, what: str) -> None:
        """Return when all ranks have come; raises PeerLost, naming who did not, if one is dead or late."""
        self._came += 1
        came, all_came = self._came, self._all_came
        self._counters.set(_CAME, came)
        for peer in range(self.size):
            if all_came[peer] < came:
                self._counters.wait(peer, _CAME, came, what)

    def agree(self, flags: int, what: str) -> int:
        """Meet, and return all ranks' flags (31 bits), OR-ed."""
        # The same word is written again two meetings later, and then everyone has read it.
        word = _FLAGS + self._came % 2
        self._counters.values[self.rank, word] = flags
        self.wait(what)
        return int(numpy.bitwise_or.reduce(self._counters.values[:, word]))

    def close(self) -> None:
        """Let go of the board's descriptors."""
        self._counters.close()
        if self._own is not None:
            self._own.close()
