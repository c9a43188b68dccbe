"""The seam of the reduce: how ranks' subtree sums of one bucket become the root, on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from dure import tree
from dure.exchange.group import naming_the_wait
from dure.shards import shards_of_rank


@dataclass(frozen=True)
class Pieces:
    """Which subtrees each rank holds when its own shards are added: the shape of one exchange."""

    by_rank: tuple[tuple[range, ...], ...]
    leaves: int

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


class Exchanger(Protocol):
    """Adds everyone's pieces in tree order."""

    def exchange(self, own: Sequence[torch.Tensor], shape: Pieces, scale: float, out: torch.Tensor) -> None:
        """Put `scale` × the sum of all ranks' pieces into `out`, the same bits on every rank.

        `own` are this rank's pieces from left to right, flat, as long as `out`; none on an idle rank.
        They may be overwritten; the last may be `out` itself.
        """
        ...


class Alone:
    """No exchange: a rank's own shards are all there is (one rank, or `sync = false`)."""

    def exchange(self, own: Sequence[torch.Tensor], shape: Pieces, scale: float, out: torch.Tensor) -> None:
        """See `Exchanger`."""
        if not own:  # this rank has no samples in the step, and nobody else's gradients
            out.zero_()
            return
        total = own[0]
        for piece in own[1:]:
            total.add_(piece)
        torch.mul(total, scale, out=out)


class OverGloo:
    """All-to-all of slices, a local sum in tree order, all-gather of the sums.

    Every rank owns one slice of the bucket: the bytes of a ring, in our order.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, ranks: int) -> None:
        self._group = group
        self._rank = rank
        self._ranks = ranks

    def exchange(self, own: Sequence[torch.Tensor], shape: Pieces, scale: float, out: torch.Tensor) -> None:
        """See `Exchanger`."""
        width = max(1, -(-out.numel() // self._ranks))
        held = [len(pieces) for pieces in shape.by_rank]
        sent = out.new_zeros(self._ranks, len(own), width)
        for position, piece in enumerate(own):
            _scatter(piece, sent[:, position])
        received = out.new_empty(sum(held), width)
        with naming_the_wait(self._rank, "the exchange of gradients"):
            dist.all_to_all_single(
                received.view(-1),
                sent.view(-1),
                output_split_sizes=[count * width for count in held],
                input_split_sizes=[len(own) * width] * self._ranks,
                group=self._group,
            )
            additions, (root,) = tree.join_order(shape.in_order, shape.leaves)
            for left, right in additions:
                received[left].add_(received[right])
            whole = out.new_empty(self._ranks * width)
            dist.all_gather_single(whole, received[root].mul_(scale), group=self._group)
        out.copy_(whole[: out.numel()])


def _scatter(flat: torch.Tensor, slices: torch.Tensor) -> None:
    """Copy a flat tensor into equal slices (rows); the last rows may stay partly zero."""
    full, rest = divmod(flat.numel(), slices.shape[1])
    slices[:full].copy_(flat[: full * slices.shape[1]].view(full, -1))
    if rest:
        slices[full, :rest].copy_(flat[full * slices.shape[1] :])
