"""The seam of the reduce: how ranks' subtree sums of one bucket become the root, on every rank."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from dure.comm import tree
from dure.comm.reduce.waits import Waits
from dure.data.shards import shards_of_rank

NOT_FINITE, ALL_USED = 1, 2
"""Flags of a step, OR-ed over ranks: a sum that is NaN, infinite or too large for the gradient's type; a rank whose
shards used every parameter."""


@dataclass(frozen=True)
class Pieces:
    """Which subtrees each rank holds when its own shards are added: the shape of one exchange."""

    by_rank: tuple[tuple[range, ...], ...]
    leaves: int
    """Shards with samples; with the team's size, this decides the whole shape."""

    @classmethod
    @functools.lru_cache(maxsize=64)
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
    # Where the batch goes on behind this rank's shards, it does not matter how far.
    sizes = range(run.start + 1, min(run.stop + 1, shards) + 1)
    return max(len(tree.subtrees(range(run.start, min(run.stop, active)), active)) for active in sizes)


@dataclass
class BucketBuffers:
    """Where one bucket's pieces are put for the exchange."""

    index: int
    out: torch.Tensor
    """This rank's last piece before the exchange, the root after it. Flat, in the dtype that is added in."""
    limit: float
    """The largest magnitude that the bucket's own dtype holds."""
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

    def serves(self, buffer: torch.Tensor) -> bool:
        """Whether its memory fits a bucket: as long, added in the same dtype, on the same device."""
        return (
            self.out.numel() == buffer.numel()
            and self.out.dtype == adding_dtype(buffer.dtype)
            and self.limit == largest(buffer.dtype)
            and self.out.device == buffer.device
        )


@dataclass(frozen=True)
class Exchange:
    """What one bucket's exchange gives: `scale` × the sum of all ranks' pieces."""

    shape: Pieces
    scale: float
    flags: int = 0
    """This rank's, as far as it knows them by now."""
    own: Sequence[range] | None = None
    """If given, this rank needs no other places of the bucket; ranks' own places differ and leave nothing out. Whether
    the rest of `out` is filled is the exchanger's choice."""


class Exchanger(Protocol):
    """Adds everyone's pieces in tree order. Used by one thread."""

    waits: Waits
    """Where it counts the time that it waits for other ranks."""

    def buffers(self, index: int, buffer: torch.Tensor) -> BucketBuffers:
        """Where the bucket's pieces go; its `out` holds the buffer's content (and may be the buffer)."""
        ...

    def exchange(self, buffers: BucketBuffers, asked: Exchange) -> None:
        """Put the sum that is asked for into `buffers.out`, the same bits on every rank. It is there, on this rank,
        when the next `conclude` returns."""
        ...

    def conclude(self) -> int:
        """After a step's last exchange: return when all its results are there and no rank reads this rank's
        buffers any more. The flags of all ranks' last exchanges, OR-ed; among them NOT_FINITE if any sum was not."""
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


def largest(dtype: torch.dtype) -> float:
    """The largest sum that does not become infinite when it is rounded to `dtype`."""
    # Above these, the nearest value of the type would be infinity: half a step beyond its largest.
    return {torch.float16: 65519.99, torch.bfloat16: 3.396e38}.get(dtype, torch.finfo(dtype).max)


def is_finite(tensor: torch.Tensor, limit: float) -> bool:
    """Whether all elements are numbers of at most this magnitude."""
    return bool(all_finite(tensor, limit))


def all_finite(tensor: torch.Tensor, limit: float) -> torch.Tensor:
    """The same as one element where the tensor is, so that nobody has to wait for it."""
    return (tensor.abs() <= limit).all()
