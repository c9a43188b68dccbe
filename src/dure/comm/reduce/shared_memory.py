"""The exchange within a node: everyone's bucket is in shared memory, and each rank adds its own slice.

DDP's buckets are moved into shared memory in place, so that nothing is copied in. Each rank walks over its
slice in one pass: it adds everyone's pieces in tree order and writes the scaled sum back into everyone's
bucket, over the bytes it has just read. Memory is read once and written once, which is what one plain copy
costs. One barrier per bucket: all pieces are there. One more at the end of the step: all slices are done; not where all
buckets were small (see small_buckets.py).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dure.base.say import say
from dure.comm.group import Group
from dure.comm.reduce.exchanger import (
    NOT_FINITE,
    BucketBuffers,
    Exchange,
    Pieces,
    Wire,
    adding_dtype,
    joined,
    largest,
    leading_to,
)
from dure.comm.reduce.small_buckets import SmallBuckets, SmallBuffers, slot_bytes
from dure.comm.reduce.treesum import TreeSum, tree_sum
from dure.comm.reduce.waits import Waits
from dure.comm.shm_barrier import ShmBarrier, barrier_bytes
from dure.comm.shm_segment import Segment, map_everyones, offer_tensor, share_segment

ALIGNED = 16
"""Slices start at multiples of this many elements, a cache line: no two ranks write to one line."""
SHM = "/dev/shm"
_WHAT = "the exchange of gradients"


@dataclass
class _SharedBuckets(BucketBuffers):
    """Buffers that all ranks of the node can see."""

    everyones: list[list[torch.Tensor]] = field(default_factory=list)
    """Each rank's extras and `out`, mapped into this process."""
    in_place: bool = True
    """`out` is DDP's own buffer."""
    segments: list[Segment] = field(default_factory=list)
    walks: dict[tuple[int, tuple[range, ...] | None], TreeSum] = field(default_factory=dict)
    """By number of active shards and places that this rank alone needs (None: this rank's slice)."""


class ThroughSharedMemory:
    """The exchanger of ranks on one node."""

    def __init__(
        self,
        group: Group,
        extras: Sequence[int],
        totals: int,
        deadline_seconds: float,
        wire: Wire,
        *,
        is_whole: bool = True,
    ) -> None:
        """`extras` are the pieces that each rank may hold beside its bucket, `totals` the numbers of `total`. Without
        `is_whole` these ranks' sums go on to other nodes, from buckets in shared memory.

        Raises OSError where memory cannot be shared; a collective call, to be made within `share_or_none`.
        """
        self._group = group
        self._rank = group.rank
        self._ranks = group.size
        self._extras = extras
        self._wire = wire
        slots_at = -(-barrier_bytes(group.size, 2 * totals) // mmap.PAGESIZE) * mmap.PAGESIZE
        shared = share_segment(group, slots_at + slot_bytes(extras), "sharing a barrier")
        self._barrier = ShmBarrier(shared, 2 * totals, deadline_seconds)
        self._small = SmallBuckets(shared.bytes, slots_at, extras, group.rank, wire) if is_whole else None
        self.waits = Waits()
        self._half = 0
        self._bucket_buffers: dict[int, _SharedBuckets | SmallBuffers] = {}
        self._told = False
        self._flags = 0
        """This rank's, not yet told to the others."""
        self._agreed = 0
        """Everyone's, of this step."""
        self._is_agreed = False
        """Whether there was a barrier after the last sum of this step that another rank writes for this one."""

    def buffers(self, index: int, buffer: torch.Tensor) -> BucketBuffers:
        """See `Exchanger`. New buckets (at first, and when DDP rebuilds them) come to all ranks alike."""
        if not buffer.numel():
            return BucketBuffers(index, buffer, largest(buffer.dtype))
        known = self._bucket_buffers.get(index)
        small = self._small.buffers(index, buffer, known) if self._small is not None else None
        if small is not None:
            if isinstance(known, _SharedBuckets):
                self._drop(known)
            self._bucket_buffers[index] = small
            return small
        if isinstance(known, _SharedBuckets) and known.serves(buffer):
            if not known.in_place:
                known.out.copy_(buffer)
                return known
            if known.out.data_ptr() == buffer.data_ptr():
                return known
        if isinstance(known, _SharedBuckets):
            self._drop(known)
        buffers = self._new_buffers(index, buffer)
        self._bucket_buffers[index] = buffers
        return buffers

    def exchange(self, buffers: BucketBuffers, asked: Exchange) -> None:
        """See `Exchanger`."""
        self._flags |= asked.flags
        self._is_agreed = False
        if not buffers.out.numel():
            return
        if isinstance(buffers, SmallBuffers):
            self._exchange_small(buffers, asked)
            return
        assert isinstance(buffers, _SharedBuckets)
        # The places are part of the key: when DDP rebuilds its buckets, one as long as before holds other parameters.
        key = (asked.shape.leaves, None if asked.own is None else tuple(asked.own))
        walk = buffers.walks.get(key)
        if walk is None:
            walk = buffers.walks[key] = self._walk(buffers, asked.shape, asked.own)
        self.wait()
        if not walk(asked.scale):
            self._flags |= NOT_FINITE

    def _exchange_small(self, buffers: SmallBuffers, asked: Exchange) -> None:
        """Every rank has all sums, and everyone's flags, after one barrier."""
        assert self._small is not None
        add = self._small.give(buffers, asked.shape)
        self._agree()
        self._is_agreed = True
        if not add(asked.scale):
            self._agreed |= NOT_FINITE

    def conclude(self) -> int:
        """See `Exchanger`."""
        if not self._is_agreed:  # all ranks alike, as they exchange the same buckets
            self._agree()
        flags, self._agreed, self._is_agreed = self._agreed, 0, False
        return flags

    def _agree(self) -> None:
        """A barrier at which all ranks' flags become everyone's."""
        self._agreed |= self.agree(self._flags)
        self._flags = 0

    def wait(self) -> None:
        """Wait for all ranks of the node."""
        with self.waits:
            self._barrier.wait(_WHAT)

    def agree(self, flags: int) -> int:
        """Wait for all ranks of the node; their flags, OR-ed."""
        with self.waits:
            return self._barrier.agree(flags, _WHAT)

    def slice_of(self, buffers: BucketBuffers) -> slice:
        """The elements of a bucket that this rank adds."""
        return slice(*_slice(self._rank, self._ranks, buffers.out.numel()))

    def sums(
        self,
        buffers: BucketBuffers,
        part: slice,
        by_rank: Sequence[Sequence[range]],
        leaves: int,
        into: Sequence[torch.Tensor],
    ) -> list[TreeSum]:
        """How this node's subtree sums of a part of this rank's slice are put `into` memory of its own."""
        assert isinstance(buffers, _SharedBuckets)
        pieces = [piece[part] for piece in _held(by_rank, buffers.everyones)]
        additions, _, positions = joined([p for pieces in by_rank for p in pieces], leaves)
        return [
            tree_sum(pieces, leading_to(at, additions), at, [out], self._wire, buffers.limit)
            for at, out in zip(positions, into, strict=True)
        ]

    def outs(self, buffers: BucketBuffers, part: slice) -> list[torch.Tensor]:
        """A part of this rank's slice in the bucket of everyone on the node."""
        assert isinstance(buffers, _SharedBuckets)
        return [tensors[-1][part] for tensors in buffers.everyones]

    def total(self, vector: torch.Tensor) -> None:
        """See `Exchanger`. Two halves of the board in turn: nobody writes what another may still read."""
        flat = vector.view(-1)
        self._half ^= 1
        start = self._half * flat.numel()
        board = self._barrier.board[:, start : start + flat.numel()]
        board[self._rank] = flat.numpy()
        with self.waits:
            self._barrier.wait("the exchange of losses")
        flat.copy_(torch.from_numpy(board.sum(axis=0)))

    def close(self) -> None:
        """See `Exchanger`."""
        for buffers in self._bucket_buffers.values():
            if isinstance(buffers, _SharedBuckets):
                self._drop(buffers)
        self._bucket_buffers.clear()
        self._barrier.close()

    def _new_buffers(self, index: int, buffer: torch.Tensor) -> _SharedBuckets:
        dtype = adding_dtype(buffer.dtype)
        nbytes = buffer.numel() * dtype.itemsize
        in_place = dtype == buffer.dtype and self._shm_has_room(nbytes) and self._move_bucket(buffer)
        segments = [Segment(nbytes) for _ in range(self._extras[self._rank] + (not in_place))]
        offers = [segment.offer() for segment in segments]
        if in_place:
            out = buffer
            offers.append(offer_tensor(buffer))
        else:
            out = segments[-1].tensor(dtype, buffer.numel())
            out.copy_(buffer)
        extras = [segment.tensor(dtype, out.numel()) for segment in segments[: self._extras[self._rank]]]
        everyones = [
            [torch.frombuffer(memory, dtype=dtype, count=out.numel()) for memory in memories]
            for memories in map_everyones(self._group, offers, "sharing buckets")
        ]
        everyones[self._rank] = [*extras, out]
        return _SharedBuckets(index, out, largest(buffer.dtype), extras, everyones, in_place, segments)

    def _move_bucket(self, buffer: torch.Tensor) -> bool:
        """Move DDP's bucket into shared memory; whether every rank could. Other programs fill /dev/shm too."""
        trouble = ""
        try:
            buffer.share_memory_()
        except RuntimeError as error:
            trouble = str(error)
        everyones = self._group.gather(trouble, "moving buckets into shared memory")
        rank = next((rank for rank, words in enumerate(everyones) if words), None)
        if rank is not None:
            self._say_once(f"rank {rank} cannot move a bucket into {SHM} ({everyones[rank]})")
        return rank is None

    def _say_once(self, why: str) -> None:
        if self._rank == 0 and not self._told:
            self._told = True
            say(f"{why}; buckets are copied instead (same bits, a little slower)")

    def _shm_has_room(self, nbytes: int) -> bool:
        """Whether /dev/shm takes this bucket of every rank; a bucket that did not fit would be a SIGBUS."""
        try:
            disk = os.statvfs(SHM)
            free = 0 if disk.f_flag & os.ST_RDONLY else disk.f_bavail * disk.f_frsize
        except OSError:
            free = 0
        least = min(int(text) for text in self._group.gather(str(free), "looking for shared memory"))
        pages = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE  # a file takes whole pages
        enough = least > pages * (self._ranks + 1)
        if not enough:
            self._say_once(
                f"{SHM} has {least >> 10} KiB left, too little for {self._ranks} buckets of {pages >> 10} KiB"
            )
        return enough

    def _walk(self, buffers: _SharedBuckets, shape: Pieces, own: Sequence[range] | None) -> TreeSum:
        """What this rank does at every step: with its slice of everyone's bucket, or with its own places in its
        own bucket."""
        pieces = _held(shape.by_rank, buffers.everyones)
        additions, _, (root,) = joined(shape.in_order, shape.leaves)
        everywhere = slice(0, buffers.out.numel())
        outs = self.outs(buffers, everywhere) if own is None else [buffers.out]
        mine = self.slice_of(buffers)
        places = [range(mine.start, mine.stop)] if own is None else own
        return tree_sum(pieces, additions, root, outs, self._wire, buffers.limit, places=places)

    def _drop(self, buffers: _SharedBuckets) -> None:
        for segment in buffers.segments:
            segment.close()


def _held(by_rank: Sequence[Sequence[range]], everyones: Sequence[list[torch.Tensor]]) -> list[torch.Tensor]:
    """The tensors of all pieces, from left to right."""
    held = zip(by_rank, everyones, strict=True)
    return [tensor for pieces, tensors in held for tensor in _last(tensors, len(pieces))]


def _last(tensors: list[torch.Tensor], count: int) -> list[torch.Tensor]:
    """A rank's `count` pieces: its first extras and its `out`."""
    return [*tensors[: count - 1], tensors[-1]] if count else []


def _slice(rank: int, ranks: int, numel: int) -> tuple[int, int]:
    """The elements that a rank adds, on whole cache lines."""
    width = -(-numel // ranks)
    width = -(-width // ALIGNED) * ALIGNED
    return min(rank * width, numel), min((rank + 1) * width, numel)
