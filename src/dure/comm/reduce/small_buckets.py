"""The exchange of small buckets within a node: copied into slots, and added whole by every rank.

A bucket in place saves copies and costs barriers: one that all pieces are there, one that all slices are done. With few
bytes the second takes longer than everything else. So each rank copies its pieces into a slot of its own and, after one
barrier, adds everyone's itself. There are two slots per rank, used in turn: who writes to one has met everyone since it
was last read.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dure.comm.reduce.exchanger import BucketBuffers, Pieces, Wire, adding_dtype, joined, largest
from dure.comm.reduce.treesum import TreeSum, tree_sum

READ_BYTES = 512 << 10
"""All pieces of a small bucket together: what every rank reads."""
MOST_BYTES = 64 << 10
"""Of one piece."""


@dataclass
class SmallBuffers(BucketBuffers):
    """Buffers of this rank's own."""

    walks: dict[int, tuple[_Walk, _Walk]] = field(default_factory=dict)
    """By number of active shards; one for each slot."""


@dataclass(frozen=True)
class _Walk:
    """One exchange with one of the two slots."""

    into: list[torch.Tensor]
    """Where this rank's pieces go."""
    add: TreeSum


class SmallBuckets:
    """Slots of the ranks of a node, in memory that they share. The caller owns the barrier."""

    def __init__(self, memory: mmap.mmap, start: int, extras: Sequence[int], rank: int, wire: Wire) -> None:
        """`memory` has `slot_bytes` from `start` on; `extras` are the pieces that each rank may hold beside its
        bucket."""
        self._memory = memory
        self._start = start
        self._ranks = len(extras)
        self._rank = rank
        self._pieces = max(extras) + 1
        self._largest = _largest_piece(extras)
        self._wire = wire
        self._turn = 0

    def buffers(self, index: int, buffer: torch.Tensor, known: BucketBuffers | None) -> SmallBuffers | None:
        """For a bucket that is small enough, all ranks alike; else None."""
        dtype = adding_dtype(buffer.dtype)
        if buffer.numel() * dtype.itemsize > self._largest:
            return None
        in_place = dtype == buffer.dtype
        if isinstance(known, SmallBuffers) and known.serves(buffer):
            if not in_place:
                known.out.copy_(buffer)
                return known
            if known.out.data_ptr() == buffer.data_ptr():
                return known
        return SmallBuffers(index, buffer if in_place else buffer.to(dtype), largest(buffer.dtype))

    def give(self, buffers: SmallBuffers, shape: Pieces) -> TreeSum:
        """Put this rank's pieces into its slot; what is to be called when all ranks have."""
        walks = buffers.walks.get(shape.leaves)
        if walks is None:
            walks = buffers.walks[shape.leaves] = (
                self._walk(buffers, shape, 0),
                self._walk(buffers, shape, 1),
            )
        self._turn ^= 1
        walk = walks[self._turn]
        for slot, piece in zip(walk.into, buffers.own(len(walk.into)), strict=True):
            slot.copy_(piece)
        return walk.add

    def _walk(self, buffers: SmallBuffers, shape: Pieces, turn: int) -> _Walk:
        by_rank = [
            [self._slot(turn, rank, piece, buffers.out) for piece in range(len(pieces))]
            for rank, pieces in enumerate(shape.by_rank)
        ]
        additions, _, (root,) = joined(shape.in_order, shape.leaves)
        everyones = [slot for slots in by_rank for slot in slots]
        add = tree_sum(everyones, additions, root, [buffers.out], self._wire, buffers.limit)
        return _Walk(by_rank[self._rank], add)

    def _slot(self, turn: int, rank: int, piece: int, like: torch.Tensor) -> torch.Tensor:
        at = ((turn * self._ranks + rank) * self._pieces + piece) * self._largest
        return torch.frombuffer(self._memory, dtype=like.dtype, count=like.numel(), offset=self._start + at)


def slot_bytes(extras: Sequence[int]) -> int:
    """Bytes of all slots."""
    return 2 * len(extras) * (max(extras) + 1) * _largest_piece(extras)


def _largest_piece(extras: Sequence[int]) -> int:
    """Bytes, in whole pages."""
    pieces = sum(extras) + len(extras)
    return max(min(MOST_BYTES, READ_BYTES // pieces) // mmap.PAGESIZE, 1) * mmap.PAGESIZE
