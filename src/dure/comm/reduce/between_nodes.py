"""The exchange between nodes: sums within each node first, then every rank swaps only its own slice.

Each link carries one bucket's bytes a direction, where a ring over all ranks would carry almost two. The
node's sums are whole subtrees, so the bits are those of one node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dure.comm.group import Group
from dure.comm.link import Link
from dure.comm.reduce.exchanger import NOT_FINITE, BucketBuffers, Exchange, Pieces, Wire, is_finite, joined
from dure.comm.reduce.over_backend import OverGloo, flags_of_all
from dure.comm.reduce.shared_memory import ALIGNED, ThroughSharedMemory
from dure.comm.reduce.treesum import TreeSum, tree_sum
from dure.device.fingerprint import raw_bytes

MOST_PARTS = 16
LEAST_ELEMENTS = 64 * 1024
"""Of a part: shorter ones would cost more in turns than they gain in overlap."""


@dataclass
class _Part:
    """One part of this rank's slice on its way to the other node and back; memory and sums are made once."""

    sums: list[TreeSum]
    """Put this node's subtree sums into `own`."""
    own: list[torch.Tensor]
    going: list[torch.Tensor]
    """What is sent: `own`, or its rounded copy."""
    arrived: list[torch.Tensor]
    came: list[torch.Tensor]
    """What arrived, in the dtype that is added in."""
    finish: TreeSum
    """Adds both nodes' sums and gives everyone on the node the scaled root."""
    scale: float = 0.0
    finite: bool = True

    def __post_init__(self) -> None:
        self._going, self._space = (
            [raw_bytes(tensor) for tensor in tensors if tensor.numel()]
            for tensors in (self.going, self.arrived)
        )

    def pack(self) -> Sequence[memoryview]:
        """See `Parcel`: this node's sums."""
        for add in self.sums:
            add(1.0)
        _copied(self.own, self.going)
        return self._going

    def space(self) -> Sequence[memoryview]:
        """See `Parcel`."""
        return self._space

    def unpack(self) -> None:
        """See `Parcel`: the other node's sums have come."""
        _copied(self.arrived, self.came)
        self.finite = self.finish(self.scale)


class _Flags:
    """One byte each way, between the two nodes."""

    def __init__(self, own: int) -> None:
        self._own = bytes([own])
        self._come = bytearray(1)

    def pack(self) -> Sequence[memoryview]:
        """See `Parcel`."""
        return [memoryview(self._own)]

    def space(self) -> Sequence[memoryview]:
        """See `Parcel`."""
        return [memoryview(self._come)]

    def unpack(self) -> None:
        """See `Parcel`."""

    @property
    def both(self) -> int:
        """Both nodes' flags, OR-ed, once they were swapped."""
        return self._own[0] | self._come[0]


class BetweenNodes:
    """The exchanger of several nodes with the same number of ranks each, numbered node by node."""

    def __init__(
        self,
        local: ThroughSharedMemory,
        local_size: int,
        peers: Group,
        everyone: Group,
        wire: Wire,
        link: Link | None,
    ) -> None:
        """`peers` are the ranks of all nodes that own the same slice as this one; `link` leads to the one of two
        nodes."""
        self._link = link
        self._local = local
        self.waits = local.waits
        self._local_size = local_size
        self._everyone = everyone
        self._wire = wire
        self._node = everyone.rank // local_size
        self._nodes = everyone.size // local_size
        # Rounding at the root is done here or by this node's own sums, never by the way over several nodes.
        self._over_gloo = OverGloo(peers.group, peers, wire)
        self._peers = peers
        self._parts: dict[int, tuple[BucketBuffers, dict[int, list[_Part]]]] = {}
        """By bucket and number of active shards; for the buffers they were made for."""
        self._flags = 0

    def buffers(self, index: int, buffer: torch.Tensor) -> BucketBuffers:
        """See `Exchanger`."""
        return self._local.buffers(index, buffer)

    def exchange(self, buffers: BucketBuffers, asked: Exchange) -> None:
        """See `Exchanger`."""
        self._flags |= asked.flags
        if not buffers.out.numel():
            return
        if self._link is not None:
            self._swap(self._link, buffers, asked)
        else:
            self._through_all(buffers, asked)

    def conclude(self) -> int:
        """See `Exchanger`."""
        flags, self._flags = self._local.agree(self._flags), 0
        if self._link is None:
            return flags_of_all(flags, self._peers)
        of_nodes = _Flags(flags)
        with self.waits:
            self._link.swap([of_nodes], "the exchange of gradients between nodes")
        return of_nodes.both

    def total(self, vector: torch.Tensor) -> None:
        """See `Exchanger`."""
        with self.waits:
            self._everyone.sum(vector, "the exchange of losses")

    def close(self) -> None:
        """See `Exchanger`."""
        self._parts.clear()
        if self._link is not None:
            self._link.close()
        self._local.close()

    def _swap(self, link: Link, buffers: BucketBuffers, asked: Exchange) -> None:
        """Two nodes: each sends its sums to the other, and both add; in parts, so that the wire never waits
        for the adding, nor the adding for more than the first part."""
        parts = self._parts_of(buffers, asked.shape)
        for part in parts:
            part.scale = asked.scale
        self._local.wait()
        with self.waits:  # the sums are made meanwhile; the wire and the other node take the rest
            link.swap(parts, "the exchange of gradients between nodes")
        if not all(part.finite for part in parts):
            self._flags |= NOT_FINITE

    def _parts_of(self, buffers: BucketBuffers, shape: Pieces) -> list[_Part]:
        known, by_leaves = self._parts.get(buffers.index, (None, {}))
        if known is not buffers:
            by_leaves = {}
            self._parts[buffers.index] = buffers, by_leaves
        if shape.leaves not in by_leaves:
            by_leaves[shape.leaves] = self._new_parts(buffers, shape)
        return by_leaves[shape.leaves]

    def _new_parts(self, buffers: BucketBuffers, shape: Pieces) -> list[_Part]:
        of_nodes = shape.of_nodes(self._local_size)
        additions, _, (root,) = joined(of_nodes.in_order, of_nodes.leaves)
        # Only the root's own children are rounded; deeper subtrees (nodes with odd shares) cross as they are.
        rounded = self._wire.rounds and len(additions) == 1
        mine, theirs = (len(of_nodes.by_rank[node]) for node in (self._node, 1 - self._node))
        wire_dtype = self._wire.dtype if rounded else buffers.out.dtype
        cuts = _cuts(self._local.slice_of(buffers))
        widest = max((cut.stop - cut.start for cut in cuts), default=0)
        # One place for what comes: it is added at once, and stays in the core's cache.
        arriving = buffers.out.new_empty(theirs, widest, dtype=wire_dtype)
        coming = buffers.out.new_empty(theirs, widest) if rounded else arriving
        parts = []
        for cut in cuts:
            width = cut.stop - cut.start
            own = list(buffers.out.new_empty(mine, width))
            came = [row[:width] for row in coming]
            both = [*own, *came] if self._node == 0 else [*came, *own]
            part = _Part(
                sums=self._local.sums(buffers, cut, self._own_node(shape), shape.leaves, own),
                own=own,
                going=[row.to(wire_dtype) for row in own],
                arrived=[row[:width] for row in arriving] if rounded else came,
                came=came,
                finish=tree_sum(
                    both,
                    additions,
                    root,
                    self._local.outs(buffers, cut),
                    self._wire,
                    buffers.limit,
                    cold=True,
                ),
            )
            parts.append(part)
        return parts

    def _own_node(self, shape: Pieces) -> Sequence[Sequence[range]]:
        first = self._node * self._local_size
        return shape.by_rank[first : first + self._local_size]

    def _through_all(self, buffers: BucketBuffers, asked: Exchange) -> None:
        """More nodes, or none that a link could be laid to: the slice is cut again, one part per node."""
        shape, scale = asked.shape, asked.scale
        cut, of_nodes = self._local.slice_of(buffers), shape.of_nodes(self._local_size)
        held = of_nodes.by_rank[self._node]
        sums = list(buffers.out.new_empty(len(held), cut.stop - cut.start))
        self._local.wait()
        for add in self._local.sums(buffers, cut, self._own_node(shape), shape.leaves, sums):
            add(1.0)
        whole = sums[-1] if sums else buffers.out.new_empty(cut.stop - cut.start)
        with self.waits:
            self._over_gloo.exchange(
                BucketBuffers(-1, whole, buffers.limit, sums[:-1]), Exchange(of_nodes, 1.0)
            )
            self._over_gloo.conclude()
        for out in self._local.outs(buffers, cut):
            torch.mul(whole, scale, out=out)
        if not is_finite(whole * scale, buffers.limit):
            self._flags |= NOT_FINITE


def _copied(out_of: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
    """Copy, and convert, unless they are the same."""
    for source, target in zip(out_of, into, strict=True):
        if target is not source:
            target.copy_(source)


def _cuts(whole: slice) -> list[slice]:
    """A slice in parts; none for an empty one."""
    width = max(LEAST_ELEMENTS, -(-(whole.stop - whole.start) // MOST_PARTS))
    width = -(-width // ALIGNED) * ALIGNED
    return [slice(at, min(at + width, whole.stop)) for at in range(whole.start, whole.stop, width)]
