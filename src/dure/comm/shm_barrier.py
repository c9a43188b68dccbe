"""Numbers in shared memory that the ranks of one node count up and wait for, and the barrier made of them.

Every rank owns one line: a few counters that only it writes, so that plain stores are enough. A rank that has to
wait sleeps on the counter it waits for (Linux's futex), and looks now and then whether that counter's owner still
lives. A barrier is over for a rank when every rank has arrived at as many as itself.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import select
import time
from collections.abc import Callable

import numpy

from dure.base.errors import PeerLost
from dure.comm.shm_segment import SharedSegment

_LINE = 64
"""Bytes between two ranks' counters: a cache line, so that waiting ranks do not disturb the others."""
_LOOK_SECONDS = 0.2
"""How often a sleeping rank looks whether the peer it waits for still lives."""
_SPIN_SECONDS = 30e-6
"""How long a rank looks before it sleeps, where every rank has a core of its own."""
_WAIT, _WAKE = 0, 1  # futex without the private flag: the word is shared between processes
_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_CAME, _FLAGS = 0, 1
"""Counters of a rank's line: how many barriers it arrived at; then its flags, for odd and for even barriers."""


def line_bytes(ranks: int) -> int:
    """The room that the counters of so many ranks take."""
    return _LINE * ranks


def barrier_bytes(ranks: int, numbers: int) -> int:
    """The room that a barrier of so many ranks takes, with `numbers` on the board of each."""
    return line_bytes(ranks) + 8 * numbers * ranks


class ShmCounters:
    """All ranks' counters, at most 16 per rank. Each counter is counted by one thread."""

    def __init__(self, shared: SharedSegment, deadline_seconds: float) -> None:
        """`shared` begins with the ranks' lines, zeroed. Raises OSError where ranks cannot wait for each other so."""
        self.rank = shared.rank
        self.size = len(shared.pids)
        self._pids = shared.pids
        self._deadline_seconds = deadline_seconds
        lines = numpy.frombuffer(shared.bytes, numpy.int32, line_bytes(self.size) // 4)
        self.values = lines.reshape(self.size, _LINE // 4)
        """By rank, then by counter."""
        base = ctypes.addressof(ctypes.c_char.from_buffer(shared.bytes))
        self._lines = [base + _LINE * rank for rank in range(self.size)]
        self._futex = _Futex()
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


class ShmBarrier:
    """A barrier of the ranks that share a segment, with a board for a few numbers. One thread uses it."""

    def __init__(self, shared: SharedSegment, numbers: int, deadline_seconds: float) -> None:
        """`shared` begins with `barrier_bytes` of zeros; `numbers` is each rank's room on the board."""
        self._shared = shared
        self.rank = shared.rank
        self.size = len(shared.pids)
        self._counters = ShmCounters(shared, deadline_seconds)
        board = numpy.frombuffer(shared.bytes, numpy.float64, numbers * self.size, line_bytes(self.size))
        self.board = board.reshape(self.size, numbers)
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
        """Let go of the descriptors of the board and of the segment."""
        self._counters.close()
        self._shared.close()


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Futex:
    """The two calls, bound once; they release the GIL while they wait."""

    def __init__(self) -> None:
        number = _NUMBERS.get(platform.machine())
        if number is None:
            raise OSError(errno.ENOSYS, f"no futex known on {platform.machine()}")
        self._number = number
        library = ctypes.CDLL(None, use_errno=True)
        self._syscall = library.syscall
        self._syscall.restype = ctypes.c_long
        self._syscall.argtypes = (
            ctypes.c_long,
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int,
        )

    def wait(self, address: int, value: int, seconds: float) -> None:
        """Sleep while the word at `address` is `value`, at most so long; may return early."""
        limit = _TimeSpec(int(seconds), int(seconds % 1 * 1e9))
        if self._syscall(self._number, address, _WAIT, value, ctypes.addressof(limit), None, 0) == -1:
            code = ctypes.get_errno()
            if code not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
                raise OSError(code, os.strerror(code))

    def wake(self, address: int) -> None:
        """Wake everyone who sleeps on this word."""
        self._syscall(self._number, address, _WAKE, 2**31 - 1, None, None, 0)
