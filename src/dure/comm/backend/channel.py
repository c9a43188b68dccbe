"""The shared memory of a process group's ranks, and whole collectives through it by `collectives.c`."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from dure.base.compiled import compiled_function
from dure.base.errors import UsageError
from dure.comm import tree
from dure.comm.group import Group
from dure.comm.shm_barrier import CAME, LINE_BYTES, LOOK_NS, ShmCounters, line_bytes, spin_nanoseconds
from dure.comm.shm_segment import share_segment

SLOT_BYTES = 512 << 10
"""What a rank gives at a time: small enough that all ranks' slots stay in the caches, large enough for few barriers."""
DIRECT_BYTES = 128 << 10
"""Up to here every rank reduces everything itself: one barrier instead of two, for a little more reading."""
MOST_RANKS = 64
_ROW = 8
"""Numbers that say what a rank calls."""
_PAGE = 4096

DTYPES = {
    torch.float32: 0, torch.float64: 1, torch.int8: 2, torch.uint8: 3, torch.int16: 4, torch.uint16: 5,
    torch.int32: 6, torch.uint32: 7, torch.int64: 8, torch.uint64: 9,
}  # fmt: skip
"""Those that are combined as they are, with their numbers in collectives.c."""
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
KINDS = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "barrier")
ALL_REDUCE, REDUCE_DIRECT, BROADCAST, ALL_GATHER, REDUCE_SCATTER, BARRIER = range(6)


class _Channel(ctypes.Structure):
    """As in collectives.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("lines", "rows", "slots", "results")),
        *((name, ctypes.c_size_t) for name in ("stride", "row_bytes", "slot_bytes")),
        *((name, ctypes.c_int64) for name in ("ranks", "own", "spin_ns", "sleep_ns")),
        ("additions", ctypes.c_void_p),
        ("num_additions", ctypes.c_int64),
        ("came", ctypes.c_int64),
    )


class _Operation(ctypes.Structure):
    """As in collectives.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kind", "dtype", "op", "root")),
        ("in_", ctypes.c_void_p),
        ("outs", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("bytes", "chunk", "next", "arrived")),
    )


@dataclass(frozen=True)
class Collective:
    """One operation on this rank: contiguous tensors of one dtype on the CPU."""

    kind: int
    given: torch.Tensor | None
    """What this rank gives; of REDUCE_SCATTER all ranks' parts in one."""
    outs: Sequence[torch.Tensor]
    """Where results go; of ALL_GATHER one per rank."""
    nbytes: int
    """Of what one rank gives, or of one part."""
    op: str = "SUM"
    root: int = -1
    dtype: int = 3
    """Number of the dtype that is combined; bytes where nothing is."""


class Channel:
    """Connected with all ranks of the group. One operation at a time, in the same order on all ranks."""

    def __init__(self, group: Group, ranks: Sequence[int], deadline_seconds: float) -> None:
        """`ranks` are the names of the group's ranks in messages. Raises OSError where memory cannot be shared; a
        collective call, to be made within `share_or_none`."""
        size = group.size
        run = _compiled()
        if run is None:
            raise OSError(
                "the collectives were not compiled when dure was installed: no C compiler was there"
            )
        if size > MOST_RANKS:
            raise OSError(f"{size} ranks on one node, and {MOST_RANKS} can share memory")
        self._run = run
        self._ranks = ranks
        rows_at = line_bytes(size)
        slots_at = -(-(rows_at + size * 2 * _ROW * 8) // _PAGE) * _PAGE
        results_at = slots_at + size * 2 * SLOT_BYTES
        self._shared = share_segment(group, results_at + 2 * SLOT_BYTES, "sharing memory for collectives")
        self._counters = ShmCounters(self._shared, deadline_seconds, names=ranks)
        self._rows = numpy.frombuffer(self._shared.bytes, numpy.int64, size * 2 * _ROW, rows_at)
        self._rows = self._rows.reshape(size, 2, _ROW)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._shared.bytes))
        pairs = tree.join_order([range(rank, rank + 1) for rank in range(size)], size)[0]
        steps = [position for pair in pairs for position in pair]
        self._additions = (ctypes.c_int * max(len(steps), 1))(*steps)
        self._channel = _Channel(
            *(base, base + rows_at, base + slots_at, base + results_at),
            *(LINE_BYTES, _ROW * 8, SLOT_BYTES),
            *(size, group.rank, spin_nanoseconds(size), LOOK_NS),
            ctypes.addressof(self._additions),
            len(pairs),
            0,
        )
        self._own = group.rank
        self._size = size

    def run(self, call: Collective, deadline_seconds: float, look: Callable[[], None]) -> None:
        """Do it; raises PeerLost, naming who is dead or late, or UsageError where ranks call different things.

        `look` is called while others are waited for; what it raises ends the wait.
        """
        channel = self._channel
        chunk = SLOT_BYTES
        if call.kind == REDUCE_SCATTER:  # a slot holds a piece for every rank
            chunk = max(SLOT_BYTES // self._size // 64 * 64, 64)
        outs = (ctypes.c_void_p * max(len(call.outs), 1))(*(out.data_ptr() for out in call.outs))
        given = call.given.data_ptr() if call.given is not None else 0
        operation = _Operation(
            *(call.kind, call.dtype, OPS.index(call.op), call.root),
            *(given, ctypes.addressof(outs)),
            *(call.nbytes, chunk, 0, 0),
        )
        row = self._rows[self._own, (channel.came + 1) % 2]
        row[:5] = call.kind, call.dtype, operation.op, call.root, call.nbytes
        where = ctypes.addressof(channel), ctypes.addressof(operation)
        what = _name(call.kind, call.root)
        barrier, since = -1, 0.0
        while (came := self._run(*where)) != self._size:
            if came < 0:
                raise OSError(-came, os.strerror(-came))
            if came > self._size:
                raise UsageError(self._who_calls_what(int(channel.came) % 2))
            look()
            if barrier != channel.came:
                barrier, since = channel.came, time.monotonic()
            self._counters.refuse_lost(came, CAME, _as_int32(barrier), what, since, deadline_seconds)

    def close(self) -> None:
        """Let go of the descriptors."""
        self._counters.close()
        self._shared.close()

    def _who_calls_what(self, parity: int) -> str:
        by_call: dict[str, list[str]] = {}
        for rank, row in zip(self._ranks, self._rows[:, parity].tolist(), strict=True):
            by_call.setdefault(_described(row), []).append(str(rank))
        told = "; ".join(f"rank {', '.join(ranks)}: {call}" for call, ranks in by_call.items())
        return (
            f"the ranks call different collectives: {told}. All must make the same calls, in the same order"
        )


def _described(row: Sequence[int]) -> str:
    kind, dtype, op, root, nbytes = row[:5]
    name = next((str(each) for each, number in DTYPES.items() if number == dtype), "bytes")
    how = f" {OPS[op]} of {name}" if kind in (ALL_REDUCE, REDUCE_DIRECT, REDUCE_SCATTER) else ""
    return f"{_name(kind, root)}{how}, {nbytes} bytes{f', root {root}' if root >= 0 else ''}"


def _name(kind: int, root: int) -> str:
    return KINDS[ALL_REDUCE if kind == REDUCE_DIRECT and root < 0 else kind]


def _as_int32(number: int) -> int:
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def _compiled() -> Callable[..., Any] | None:
    pointer = ctypes.c_void_p
    return compiled_function(
        "dure.comm.backend._collectives", "dure_collective_1", pointer, pointer, returns=ctypes.c_int64
    )
