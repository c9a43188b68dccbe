"""Numbers in shared memory that the ranks of one node count up and wait for, and the barrier made of them.

Every rank owns one line: a few counters that only it writes. A rank that has to wait sleeps on the counter it waits
for (Linux's futex), and looks now and then whether that counter's owner still lives. A barrier is over for a rank when
every rank has arrived at as many as itself.

Who has seen a count must also see what its owner wrote before. `shm_barrier.c`, compiled when dure is installed,
promises it with C11 atomics. Where there was no compiler, Python counts with plain stores, which an x86-64 processor
keeps in order; on any other machine memory is then not shared between ranks.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import select
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy
import numpy.typing

from dure.base.compiled import compiled_function
from dure.base.errors import PeerLost
from dure.comm.shm_segment import SharedSegment

LINE_BYTES = 64
"""Between two ranks' counters: a cache line, so that waiting ranks do not disturb the others."""
LOOK_SECONDS = 0.2
"""How often a sleeping rank looks whether the peer it waits for still lives."""
_SPIN_SECONDS = 30e-6
"""How long a rank looks before it sleeps, where every rank has a core of its own."""
_YIELD_SECONDS = 200e-6
"""How long it looks, and lets others run meanwhile, where ranks share cores."""
_WAIT, _WAKE = 0, 1  # futex without the private flag: the word is shared between processes
_FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_ORDERED = "x86_64"
"""The machine on which other cores see plain stores in the order in which they were made."""
LOOK_NS = int(LOOK_SECONDS * 1e9)
CAME, _FLAGS = 0, 1
"""Counters of a rank's line: how many barriers it arrived at; then its flags, for odd and for even barriers."""


def line_bytes(ranks: int) -> int:
    """Bytes of the counters of so many ranks: a line for each, and one of the barrier's own."""
    return LINE_BYTES * (ranks + 1)


def spin_nanoseconds(ranks: int) -> int:
    """How long a rank looks before it sleeps in a barrier; negative: and lets others run meanwhile."""
    seconds = _SPIN_SECONDS if len(os.sched_getaffinity(0)) >= ranks else -_YIELD_SECONDS
    return int(seconds * 1e9)


def barrier_bytes(ranks: int, numbers: int) -> int:
    """Bytes of a barrier of so many ranks, with `numbers` on the board of each."""
    return line_bytes(ranks) + 8 * numbers * ranks


class ShmCounters:
    """All ranks' counters, at most 16 per rank. Each counter is counted by one thread."""

    def __init__(
        self, shared: SharedSegment, deadline_seconds: float, names: Sequence[int] | None = None
    ) -> None:
        """`shared` begins with the ranks' lines, zeroed. Raises OSError where ranks cannot wait for each other so.

        `names` are the numbers of these ranks in messages, where they are others than their positions here.
        """
        self._names = range(len(shared.pids)) if names is None else names
        self.rank = shared.rank
        self.size = len(shared.pids)
        self._pids = shared.pids
        self._deadline_seconds = deadline_seconds
        lines = numpy.frombuffer(shared.bytes, numpy.int32, LINE_BYTES * self.size // 4)
        self.values = lines.reshape(self.size, LINE_BYTES // 4)
        """By rank, then by counter. Written before this rank counts, read when the owner is known to have counted."""
        self._words = _words(shared)
        self._lives = [os.pidfd_open(pid) for pid in self._pids]
        self._spin_ns = spin_nanoseconds(self.size)
        self._spin_seconds = max(self._spin_ns, 0) / 1e9

    def set(self, counter: int, value: int) -> None:
        """Count this rank's own counter up to a value, and wake who waits for it."""
        self._words.set(_at(self.rank, counter), value)

    def wake(self, counter: int) -> None:
        """Have everyone who waits for a counter of this rank look again."""
        self._words.wake(_at(self.rank, counter))

    def all_reached(self, counter: int, value: int) -> bool:
        """Whether this counter of every rank has reached a value."""
        return self._words.all_reached(_at(0, counter), self.size, value)

    def wait(
        self,
        peer: int,
        counter: int,
        value: int,
        what: str,
        look: Callable[[], None] | None = None,
        deadline_seconds: float | None = None,
    ) -> None:
        """Return when a peer's counter has reached a value; raises PeerLost if the peer is dead or late.

        `look` is called each time that this rank wakes and the wait is not over; what it raises ends the wait.
        """
        if self._words.wait(_at(peer, counter), value, self._spin_seconds):
            return
        since = time.monotonic()
        while True:
            if look is not None:
                look()
            self.refuse_lost(peer, counter, value, what, since, deadline_seconds)
            if self._words.wait(_at(peer, counter), value, 0.0):
                return

    def refuse_lost(
        self,
        peer: int,
        counter: int,
        value: int,
        what: str,
        since: float,
        deadline_seconds: float | None = None,
    ) -> None:
        """Raise PeerLost if a peer is dead whose counter has not reached a value, or waited for too long `since`."""
        own, other = self._names[self.rank], self._names[peer]
        # Looked at again: since the caller's look it may have counted, and then ended as it should.
        if self._is_dead(peer) and not self._words.all_reached(_at(peer, counter), 1, value):
            raise PeerLost(f"rank {own} lost rank {other} in {what}: process {self._pids[peer]} is gone")
        seconds = self._deadline_seconds if deadline_seconds is None else deadline_seconds
        if time.monotonic() > since + seconds:
            raise PeerLost(
                f"rank {own} waited {seconds:g} s for rank {other} in {what}; it lives, but never came"
            )

    def arrive_and_wait(self, value: int, what: str) -> None:
        """Arrive at barrier `value`, and return when everyone has; raises PeerLost, naming who is dead or late."""
        missing = self._words.arrive_and_wait(self.size, self.rank, value, self._spin_ns)
        if missing == self.size:
            return
        since = time.monotonic()
        while missing != self.size:
            self.refuse_lost(missing, CAME, value, what, since)
            missing = self._words.arrive_and_wait(self.size, self.rank, value, 0)

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
        """`shared` begins with `barrier_bytes` of zeros; `numbers` is how many each rank has on the board."""
        self._shared = shared
        self.rank = shared.rank
        self.size = len(shared.pids)
        self._counters = ShmCounters(shared, deadline_seconds)
        board = numpy.frombuffer(shared.bytes, numpy.float64, numbers * self.size, line_bytes(self.size))
        self.board = board.reshape(self.size, numbers)
        """One row of numbers per rank; written before a barrier, read after it."""
        self._came = 0

    def wait(self, what: str) -> None:
        """Return when all ranks have come; raises PeerLost, naming who did not, if one is dead or late."""
        self._came += 1
        self._counters.arrive_and_wait(self._came, what)

    def agree(self, flags: int, what: str) -> int:
        """Wait for all ranks; their flags (31 bits), OR-ed."""
        # The same word is written again two barriers later, and then everyone has read it.
        word = _FLAGS + self._came % 2
        self._counters.values[self.rank, word] = flags
        self.wait(what)
        return int(numpy.bitwise_or.reduce(self._counters.values[:, word]))

    def close(self) -> None:
        """Let go of the descriptors of the board and of the segment."""
        self._counters.close()
        self._shared.close()


def _at(rank: int, counter: int) -> int:
    """Where a rank's counter is: bytes from the segment's start."""
    return LINE_BYTES * rank + 4 * counter


class _Words(Protocol):
    """Counters by their place in bytes. A wait sleeps once at most, for `LOOK_SECONDS`."""

    def set(self, word: int, value: int) -> None:
        """Count up, and wake who waits: who sees the value sees all that was written before."""

    def wake(self, word: int) -> None:
        """Have who waits for it look again."""

    def all_reached(self, first: int, ranks: int, value: int) -> bool:
        """Whether a counter of each of so many ranks has reached a value; `first` is rank 0's."""

    def wait(self, word: int, value: int, spin_seconds: float) -> bool:
        """Whether a counter has reached a value, after looking for so long, then sleeping."""

    def arrive_and_wait(self, ranks: int, own: int, value: int, spin_ns: int) -> int:
        """Arrive at barrier `value` and wait for everyone; the first rank that is missing, or the number of ranks."""


def _words(shared: SharedSegment) -> _Words:
    """The way to count that is right on this machine; raises OSError where there is none."""
    base = ctypes.addressof(ctypes.c_char.from_buffer(shared.bytes))
    functions = _compiled()
    if functions is not None:
        return _Atomics(base, *functions)
    machine = platform.machine()
    if len(shared.pids) > 1 and machine != _ORDERED:  # the threads of one process have the GIL between them
        raise OSError(
            f"the shared-memory barrier was not compiled when dure was installed, and {machine} needs it: install a "
            "C compiler, then dure again"
        )
    return _StoreOrder(base, numpy.frombuffer(shared.bytes, numpy.int32, line_bytes(len(shared.pids)) // 4))


def _compiled() -> tuple[Callable[..., Any], ...] | None:
    """The functions of shm_barrier.c; None where it was not compiled."""
    pointer, size, word, ns = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int32, ctypes.c_int64
    found = (
        _function("dure_counter_set_1", pointer, word),
        _function("dure_counter_wake_1", pointer),
        _function("dure_counters_reached_1", pointer, size, size, word, returns=ctypes.c_int),
        _function("dure_counter_wait_1", pointer, word, ns, ns, returns=ctypes.c_int),
        _function("dure_barrier_2", pointer, size, size, size, word, ns, ns, returns=ns),
    )
    return tuple(each for each in found if each is not None) if all(found) else None


def _function(name: str, *arguments: type, returns: type | None = None) -> Callable[..., Any] | None:
    return compiled_function("dure.comm._shm_barrier", name, *arguments, returns=returns)


class _Atomics:
    """See `_Words`; by shm_barrier.c."""

    def __init__(self, base: int, *functions: Callable[..., Any]) -> None:
        self._base = base
        self._set, self._wake, self._reached, self._wait, self._arrive_and_wait = functions

    def set(self, word: int, value: int) -> None:
        self._set(self._base + word, value)

    def wake(self, word: int) -> None:
        self._wake(self._base + word)

    def all_reached(self, first: int, ranks: int, value: int) -> bool:
        return bool(self._reached(self._base + first, ranks, LINE_BYTES, value))

    def wait(self, word: int, value: int, spin_seconds: float) -> bool:
        return _unless_failed(self._wait(self._base + word, value, int(spin_seconds * 1e9), LOOK_NS)) == 1

    def arrive_and_wait(self, ranks: int, own: int, value: int, spin_ns: int) -> int:
        return _unless_failed(
            self._arrive_and_wait(self._base, ranks, LINE_BYTES, own, value, spin_ns, LOOK_NS)
        )


def _unless_failed(result: int) -> int:
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result


class _StoreOrder:
    """See `_Words`; by plain stores of Python, for x86-64 and for the threads of one process."""

    def __init__(self, base: int, values: numpy.typing.NDArray[numpy.int32]) -> None:
        self._base = base
        self._values = values
        self._futex = _Futex()

    def set(self, word: int, value: int) -> None:
        self._values[word // 4] = value
        self.wake(word)

    def wake(self, word: int) -> None:
        self._futex.wake(self._base + word)

    def all_reached(self, first: int, ranks: int, value: int) -> bool:
        return all(int(self._values[(first + LINE_BYTES * rank) // 4]) >= value for rank in range(ranks))

    def wait(self, word: int, value: int, spin_seconds: float) -> bool:
        values, at = self._values, word // 4
        if values[at] >= value:
            return True
        until = time.perf_counter() + spin_seconds
        while spin_seconds and time.perf_counter() < until:
            if values[at] >= value:
                return True
        seen = int(values[at])
        if seen < value:
            self._futex.wait(self._base + word, seen, LOOK_SECONDS)
        return bool(values[at] >= value)

    def arrive_and_wait(self, ranks: int, own: int, value: int, spin_ns: int) -> int:
        self.set(_at(own, CAME), value)
        there = (self.wait(_at(rank, CAME), value, max(spin_ns, 0) / 1e9) for rank in range(ranks))
        return next((rank for rank, reached in enumerate(there) if not reached), ranks)


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Futex:
    """The two calls, bound once; they release the GIL while they wait."""

    def __init__(self) -> None:
        number = _FUTEX_NUMBERS.get(platform.machine())
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
