"""The exchange between nodes: sums within each node first, then every rank swaps only its own slice.

Each link carries one bucket's bytes a direction, where a ring over all ranks would carry almost two. The
node's sums are whole subtrees, so the bits are those of one node.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from dure.exchange.group import Group, naming_the_wait
from dure.reduce.exchanger import OverGloo, Pieces, Room, Wire, joined
from dure.reduce.shared import ThroughSharedMemory


class BetweenNodes:
    """The exchanger of several nodes with the same number of ranks each, numbered node by node."""

    def __init__(
        self,
        local: ThroughSharedMemory,
        local_size: int,
        peers: dist.ProcessGroup,
        everyone: Group,
        wire: Wire,
    ) -> None:
        """`peers` are the ranks of all nodes that own the same slice as this one."""
        self._local = local
        self._local_size = local_size
        self._peers = peers
        self._everyone = everyone
        self._wire = wire
        self._node = everyone.rank // local_size
        self._nodes = everyone.size // local_size
        # Rounding at the root is done here or by this node's own sums, never by the way over several nodes.
        self._over_gloo = OverGloo(peers, Group(peers, self._node, self._nodes), wire)

    def room(self, index: int, buffer: torch.Tensor) -> Room:
        """See `Exchanger`."""
        return self._local.room(index, buffer)

    def exchange(self, room: Room, shape: Pieces, scale: float) -> None:
        """See `Exchanger`."""
        if not room.out.numel():
            return
        first = self._node * self._local_size
        own_node = shape.by_rank[first : first + self._local_size]
        of_nodes = shape.of_nodes(self._local_size)
        if self._nodes == 2:
            self._swap(room, own_node, of_nodes, scale)
        else:
            self._through_all(room, own_node, of_nodes, scale)

    def total(self, vector: torch.Tensor) -> None:
        """See `Exchanger`."""
        self._everyone.sum(vector, "the exchange of losses")

    def close(self) -> None:
        """See `Exchanger`."""
        self._local.close()

    def _swap(self, room: Room, own_node: Sequence[Sequence[range]], of_nodes: Pieces, scale: float) -> None:
        """Two nodes: each sends its sums to the other, and both add; in parts, so that the wire never waits
        for the adding, nor the adding for more than the first part."""
        rank, other, out = self._everyone.rank, 1 - self._node, room.out
        peer = other * self._local_size + rank % self._local_size
        additions, _, (root,) = joined(of_nodes.in_order, of_nodes.leaves)
        # Only the root's own children are rounded; deeper subtrees (nodes with odd shares) cross as they are.
        rounded = self._wire.rounds and len(additions) == 1
        dtype = self._wire.dtype if rounded else out.dtype
        parts = _parts(self._local.slice_of(room))
        theirs = [out.new_empty(len(of_nodes.by_rank[other]), p.stop - p.start, dtype=dtype) for p in parts]
        with naming_the_wait(rank, f"the exchange with rank {peer} of node {other}"):
            # Receives come first: what arrives before anyone asked for it would wait in the socket.
            coming = [[self._receive(piece, peer) for piece in arrived] for arrived in theirs]
            self._local.meet()
            sums, going = [], []
            for part in parts:
                sums.append(self._local.sum_part(room, part, own_node, of_nodes.leaves))
                sent = [piece.to(dtype) for piece in sums[-1]]
                going += [(self._send(piece, peer), piece) for piece in sent]
            for part, own, arrived, works in zip(parts, sums, theirs, coming, strict=True):
                for work in works:
                    work.wait()
                came = [piece.to(out.dtype) for piece in arrived]
                pieces = [*own, *came] if self._node == 0 else [*came, *own]
                # What is sent may still be on its way: fp32 sums are sent as they are, so add beside them.
                pieces = [piece.clone() if len(pieces) > 1 and not rounded else piece for piece in pieces]
                for addition in additions:
                    self._wire.add(pieces[addition.left], pieces[addition.right], at_root=addition.at_root)
                self._local.write_part(room, part, pieces[root], scale)
            for work, _ in going:
                work.wait()
        self._local.meet()

    def _through_all(
        self, room: Room, own_node: Sequence[Sequence[range]], of_nodes: Pieces, scale: float
    ) -> None:
        """More nodes: the slice is cut again, one part a node."""
        part = self._local.slice_of(room)
        self._local.meet()
        sums = self._local.sum_part(room, part, own_node, of_nodes.leaves)
        whole = sums[-1] if sums else room.out.new_empty(part.stop - part.start)
        self._over_gloo.exchange(Room(-1, whole, sums[:-1]), of_nodes, 1.0)
        self._local.write_part(room, part, whole, scale)
        self._local.meet()

    def _receive(self, into: torch.Tensor, peer: int) -> dist.Work:
        work = dist.irecv(into, peer, group=self._peers)
        assert work is not None
        return work

    def _send(self, tensor: torch.Tensor, peer: int) -> dist.Work:
        work = dist.isend(tensor, peer, group=self._peers)
        assert work is not None
        return work


def _parts(whole: slice) -> list[slice]:
    """A slice in at most 8 parts of at least 64 Ki elements; none for an empty one."""
    width = max(64 * 1024, -(-(whole.stop - whole.start) // 8))
    return [slice(at, min(at + width, whole.stop)) for at in range(whole.start, whole.stop, width)]
