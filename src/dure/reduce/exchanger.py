"""The seam of the reduce: how ranks' subtree sums of one bucket become the root, on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from dure import tree
from dure.exchange.group import Group, naming_the_wait
from dure.shards import shards_of_rank


@dataclass(frozen=True)
class Pieces:
    """Which subtrees each rank holds when its own shards are added: the shape of one exchange."""

    by_rank: tuple[tuple[range, ...], ...]
    leaves: int
    """Shards with samples; with the team's size, this decides the whole shape."""

    @classmethod
    def of_step(cls, ranks: int, shards: int, active: int) -> Pieces:
        """For a step in which only the first `active` shards have samples."""
        runs = (shards_of_rank(rank, ranks, shards) for rank in range(ranks))
        return cls(
            tuple(
                tuple(tree.subtrees(range(run.start, min(run.stop, active)), active))
                if run.start < active
                else ()
                for run in runs
            ),
            active,
        )

    @property
    def in_order(self) -> list[range]:
        """All pieces from left to right."""
        return [piece for pieces in self.by_rank for piece in pieces]

    def of_nodes(self, ranks_a_node: int) -> Pieces:
        """What each *node* holds when its own ranks' pieces are added."""
        nodes = range(0, len(self.by_rank), ranks_a_node)
        held = ([p for pieces in self.by_rank[at : at + ranks_a_node] for p in pieces] for at in nodes)
        return Pieces(tuple(tuple(joined(pieces, self.leaves)[1]) for pieces in held), self.leaves)


@dataclass(frozen=True)
class Addition:
    """left ← left + right, by position."""

    left: int
    right: int
    at_root: bool
    """The sum is the root. With a bf16 wire both sides are rounded first, wherever they are."""


def joined(pieces: Sequence[range], leaves: int) -> tuple[list[Addition], list[range], list[int]]:
    """How pieces are added: the additions, the subtrees that remain, and the positions that hold them."""
    order, positions = tree.join_order(pieces, leaves)
    covered = list(pieces)
    additions = []
    for left, right in order:
        covered[left] = range(covered[left].start, covered[right].stop)
        additions.append(Addition(left, right, covered[left] == range(leaves)))
    return additions, [covered[at] for at in positions], positions


def leading_to(root: int, additions: Sequence[Addition]) -> list[Addition]:
    """Those additions, in order, that the sum at position `root` comes from."""
    wanted, kept = {root}, []
    for addition in reversed(additions):
        if addition.left in wanted:
            wanted.add(addition.right)
            kept.append(addition)
    return kept[::-1]


class Wire:
    """What numbers are rounded to where they may cross between nodes: at the two children of the root."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.rounds = dtype != torch.float32

    def round(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor rounded, in place."""
        return tensor.copy_(tensor.to(self.dtype)) if self.rounds else tensor

    def add(self, left: torch.Tensor, right: torch.Tensor, *, at_root: bool) -> None:
        """left ← left + right, rounded first if the sum is the root. `right` may be overwritten."""
        if at_root and self.rounds:
            self.round(left).add_(self.round(right))
        else:
            left.add_(right)


def most_pieces(rank: int, ranks: int, shards: int) -> int:
    """The largest number of pieces that this rank can hold, whatever the size of a batch."""
    run = shards_of_rank(rank, ranks, shards)
    return max(
        len(Pieces.of_step(ranks, shards, active).by_rank[rank])
        for active in range(run.start + 1, shards + 1)
    )


@dataclass
class Room:
    """Where one bucket's pieces are put for the exchange."""

    index: int
    out: torch.Tensor
    """This rank's last piece before the exchange, the root after it. Flat, in the dtype that is added in."""
    extras: list[torch.Tensor] = field(default_factory=list)
    """This rank's other pieces, from left to right; as long as `out`."""

    def own(self, count: int) -> Iterator[torch.Tensor]:
        """This rank's pieces, from left to right."""
        if count:
            yield from self.extras[: count - 1]
            yield self.out

    def extra(self, position: int) -> torch.Tensor:
        """Room for another piece."""
        while len(self.extras) <= position:
            self.extras.append(torch.empty_like(self.out))
        return self.extras[position]


class Exchanger(Protocol):
    """Adds everyone's pieces in tree order. Used by one thread."""

    def room(self, index: int, buffer: torch.Tensor) -> Room:
        """Where the bucket's pieces go; its `out` holds the buffer's content (and may be the buffer)."""
        ...

    def exchange(self, room: Room, shape: Pieces, scale: float, own: Sequence[slice] | None = None) -> None:
        """Put `scale` × the sum of all ranks' pieces into `room.out`, the same bits on every rank.

        With `own`, a bucket's same places at every call, this rank needs no others. They differ between ranks
        and leave nothing out. Whether the rest of `out` is filled is the exchanger's choice.
        """
        ...

    def settle(self) -> None:
        """Return when nobody looks at this rank's rooms any more, and they may be written to again. All ranks
        call it alike."""
        ...

    def met(self) -> None:
        """Take note that all ranks met elsewhere, after their last exchange: nobody looks any more."""
        ...

    def total(self, vector: torch.Tensor) -> None:
        """Add small float64 vectors over all ranks, in place; ranks fill different places, so it is exact."""
        ...

    def close(self) -> None:
        """Let go of whatever is shared."""
        ...


def adding_dtype(dtype: torch.dtype) -> torch.dtype:
    """Low-precision gradients are added in fp32."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


class PlainRooms:
    """Rooms in memory of this process alone."""

    def __init__(self) -> None:
        self._rooms: dict[int, Room] = {}

    def room(self, index: int, buffer: torch.Tensor) -> Room:
        """See `Exchanger`."""
        dtype = adding_dtype(buffer.dtype)
        known = self._rooms.get(index)
        extras = known.extras if known is not None and known.out.numel() == buffer.numel() else []
        room = Room(index, buffer if dtype == buffer.dtype else buffer.to(dtype), extras)
        self._rooms[index] = room
        return room

    def settle(self) -> None:
        """See `Exchanger`. Nobody but this rank sees them."""

    def met(self) -> None:
        """See `Exchanger`."""


class Alone(PlainRooms):
    """No exchange: a rank's own shards are all there is (one rank, or `sync = false`)."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def exchange(self, room: Room, shape: Pieces, scale: float, own: Sequence[slice] | None = None) -> None:
        """See `Exchanger`."""
        if not shape.by_rank[self._rank]:  # no samples in this step, and nobody else's gradients
            room.out.zero_()
            return
        first, *others = room.own(len(shape.by_rank[self._rank]))
        for piece in others:
            first.add_(piece)
        torch.mul(first, scale, out=room.out)

    def total(self, vector: torch.Tensor) -> None:
        """See `Exchanger`."""

    def close(self) -> None:
        """See `Exchanger`."""


class OverGloo(PlainRooms):
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

    def exchange(self, room: Room, shape: Pieces, scale: float, own: Sequence[slice] | None = None) -> None:
        """See `Exchanger`."""
        out = room.out
        if not out.numel():
            return
        width = -(-out.numel() // self._ranks)
        held = [len(pieces) for pieces in shape.by_rank]
        count = held[self._rank]
        sent = out.new_zeros(self._ranks, count, width)
        for position, piece in enumerate(room.own(count)):
            _scatter(piece, sent[:, position])
        received = out.new_empty(sum(held), width)
        with naming_the_wait(self._rank, "the exchange of gradients"):
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
            whole = out.new_empty(self._ranks * width)
            dist.all_gather_single(whole, received[root].mul_(scale), group=self._group)
        out.copy_(whole[: out.numel()])

    def total(self, vector: torch.Tensor) -> None:
        """See `Exchanger`."""
        self._totals.sum(vector, "the exchange of losses")

    def close(self) -> None:
        """See `Exchanger`."""


def _scatter(flat: torch.Tensor, slices: torch.Tensor) -> None:
    """Copy a flat tensor into equal slices (rows); the last rows may stay partly zero."""
    full, rest = divmod(flat.numel(), slices.shape[1])
    slices[:full].copy_(flat[: full * slices.shape[1]].view(full, -1))
    if rest:
        slices[full, :rest].copy_(flat[full * slices.shape[1] :])
