"""Exchanges in memory of each process alone: no exchange at all, or one by the backend's collectives."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dure.comm.group import Group, naming_the_wait
from dure.comm.reduce.exchanger import (
    NOT_FINITE,
    Addition,
    BucketBuffers,
    Exchange,
    Wire,
    adding_dtype,
    all_finite,
    joined,
    largest,
)
from dure.comm.reduce.treesum import TreeSum, tree_sum
from dure.comm.reduce.waits import Waits
from dure.device.accelerator import is_host

_MOST_FLAGS = 8


class PlainBuffers:
    """Buffers in memory of this process alone."""

    def __init__(self) -> None:
        self.waits = Waits()
        self._bucket_buffers: dict[int, BucketBuffers] = {}

    def buffers(self, index: int, buffer: torch.Tensor) -> BucketBuffers:
        """See `Exchanger`."""
        known = self._bucket_buffers.get(index)
        if known is not None and known.serves(buffer) and known.out.data_ptr() == buffer.data_ptr():
            return known
        dtype = adding_dtype(buffer.dtype)
        extras = known.extras if known is not None and known.serves(buffer) else []
        buffers = BucketBuffers(
            index, buffer if dtype == buffer.dtype else buffer.to(dtype), largest(buffer.dtype), extras
        )
        self._bucket_buffers[index] = buffers
        return buffers


class Alone(PlainBuffers):
    """No exchange: a rank's own shards are all there is (one rank, or `sync = false`)."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self._flags = 0
        self._finite: list[torch.Tensor] = []
        """Of this step's sums on a device, whether they are finite; looked at in `conclude`."""
        self._sums: dict[tuple[int, int], tuple[BucketBuffers, TreeSum]] = {}
        """By bucket and number of pieces; for the buffers they were made for."""

    def exchange(self, buffers: BucketBuffers, asked: Exchange) -> None:
        """See `Exchanger`."""
        self._flags |= asked.flags
        held = len(asked.shape.by_rank[self._rank])
        if not held:  # no samples in this step, and nobody else's gradients
            buffers.out.zero_()
        elif not is_host(buffers.out.device):
            self._finite.append(_sum_on_device(list(buffers.own(held)), asked.scale, buffers.limit))
        elif buffers.out.numel() and not self._sum(buffers, held)(asked.scale):
            self._flags |= NOT_FINITE

    def conclude(self) -> int:
        """See `Exchanger`."""
        if self._finite:
            self._flags |= 0 if bool(torch.stack(self._finite).all()) else NOT_FINITE
            self._finite.clear()
        flags, self._flags = self._flags, 0
        return flags

    def total(self, vector: torch.Tensor) -> None:
        """See `Exchanger`."""

    def close(self) -> None:
        """See `Exchanger`."""

    def _sum(self, buffers: BucketBuffers, held: int) -> TreeSum:
        known, summing = self._sums.get((buffers.index, held), (None, None))
        if known is not buffers or summing is None:
            pieces = list(buffers.own(held))
            # Without synchronisation a rank may hold subtrees that no tree joins: from left to right, then.
            additions = [Addition(0, right, at_root=False) for right in range(1, held)]
            summing = tree_sum(pieces, additions, 0, [buffers.out], Wire(), buffers.limit)
            self._sums[buffers.index, held] = buffers, summing
        return summing


class OverGloo(PlainBuffers):
    """All-to-all of slices, a local sum in tree order, all-gather of the sums.

    Every rank owns one slice of the bucket: the bytes of a ring, in our order.
    """

    def __init__(self, group: dist.ProcessGroup | None, totals: Group, wire: Wire) -> None:
        super().__init__()
        self._group = group
        self._wire = wire
        self._totals = totals
        self._rank = totals.rank
        self._ranks = totals.size
        self._flags = 0
        self._told = True
        """Whether the last exchange has told this rank's flags."""
        self._everyones: list[torch.Tensor] = []
        """What ranks told in this step's exchanges, where the gradients are; looked at in `conclude`."""

    def exchange(self, buffers: BucketBuffers, asked: Exchange) -> None:
        """See `Exchanger`."""
        out, shape = buffers.out, asked.shape
        self._flags |= asked.flags
        self._told = bool(out.numel())
        if not self._told:
            return
        width = -(-out.numel() // self._ranks)
        held = [len(pieces) for pieces in shape.by_rank]
        count = held[self._rank]
        sent = out.new_zeros(self._ranks, count, width)
        for position, piece in enumerate(buffers.own(count)):
            _scatter(piece, sent[:, position])
        received = out.new_empty(sum(held), width)
        with naming_the_wait(self._rank, "the exchange of gradients"), self.waits:
            dist.all_to_all_single(
                received.view(-1),
                sent.view(-1),
                output_split_sizes=[pieces * width for pieces in held],
                input_split_sizes=[count * width] * self._ranks,
                group=self._group,
            )
            additions, _, (root,) = joined(shape.in_order, shape.leaves)
            for addition in additions:
                self._wire.add(received[addition.left], received[addition.right], at_root=addition.at_root)
            # One more element tells this rank's flags: small whole numbers, exact in every dtype that is added in.
            slice_and_flags = out.new_empty(width + 1)
            torch.mul(received[root], asked.scale, out=slice_and_flags[:width])
            finite = all_finite(slice_and_flags[:width], buffers.limit)
            slice_and_flags[width].fill_(self._flags)
            if not self._flags & NOT_FINITE:
                slice_and_flags[width].add_(finite.logical_not(), alpha=NOT_FINITE)
            whole = out.new_empty(self._ranks * (width + 1))
            dist.all_gather_single(whole, slice_and_flags, group=self._group)
        rows = whole.view(self._ranks, width + 1)
        self._everyones.append(rows[:, width].clone())
        _gather(rows[:, :width], out)

    def conclude(self) -> int:
        """See `Exchanger`. Every exchange ends with all ranks' results and flags, but for an empty bucket's."""
        if self._everyones:  # once per step: on a device, the host waits here
            with self.waits:
                told = torch.cat([row.float() for row in self._everyones]).tolist()
            self._everyones.clear()
            for flags in {int(number) for number in told}:
                self._flags |= flags
        flags, self._flags = self._flags, 0
        return flags if self._told else flags_of_all(flags, self._totals)

    def total(self, vector: torch.Tensor) -> None:
        """See `Exchanger`."""
        with self.waits:
            self._totals.sum(vector, "the exchange of losses")

    def close(self) -> None:
        """See `Exchanger`."""


def _sum_on_device(pieces: list[torch.Tensor], scale: float, limit: float) -> torch.Tensor:
    """The pieces added from left to right, scaled, into the last; whether that is finite, as a tensor."""
    whole = pieces[0]
    for piece in pieces[1:]:
        whole.add_(piece)
    out = torch.mul(whole, scale, out=pieces[-1])
    return all_finite(out, limit)


def flags_of_all(flags: int, group: Group) -> int:
    """The flags of all ranks of a group, OR-ed."""
    bits = torch.tensor([flags >> bit & 1 for bit in range(_MOST_FLAGS)], dtype=torch.uint8)
    group.extreme(bits, "the exchange of gradients", largest=True)
    return sum(is_set << bit for bit, is_set in enumerate(bits.tolist()))


def _scatter(flat: torch.Tensor, slices: torch.Tensor) -> None:
    """Copy a flat tensor into equal slices (rows); the last rows may stay partly zero."""
    full, rest = divmod(flat.numel(), slices.shape[1])
    slices[:full].copy_(flat[: full * slices.shape[1]].view(full, -1))
    if rest:
        slices[full, :rest].copy_(flat[full * slices.shape[1] :])


def _gather(slices: torch.Tensor, flat: torch.Tensor) -> None:
    """The inverse of `_scatter`."""
    full, rest = divmod(flat.numel(), slices.shape[1])
    flat[: full * slices.shape[1]].view(full, -1).copy_(slices[:full])
    if rest:
        flat[full * slices.shape[1] :].copy_(slices[full, :rest])
