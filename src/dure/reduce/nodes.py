"""The exchange between nodes: sums within each node first, then every rank swaps only its own slice.

Each link carries one bucket's bytes a direction, where a ring over all ranks would carry almost two. The
node's sums are whole subtrees, so the bits are those of one node.
"""

from __future__ import annotations

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
        self._local.meet()
        sums = self._local.sum_slice(room, own_node, shape.leaves)
        whole = (
            self._swap(sums, of_nodes, room) if self._nodes == 2 else self._through_all(sums, of_nodes, room)
        )
        self._local.write_slice(room, whole, scale)
        self._local.meet()

    def total(self, vector: torch.Tensor) -> None:
        """See `Exchanger`."""
        self._everyone.sum(vector, "the exchange of losses")

    def close(self) -> None:
        """See `Exchanger`."""
        self._local.close()

    def _swap(self, sums: list[torch.Tensor], of_nodes: Pieces, room: Room) -> torch.Tensor:
        """Two nodes: each sends its sums to the other, and both add."""
        additions, _, (root,) = joined(of_nodes.in_order, of_nodes.leaves)
        # Only the root's own children are rounded; deeper subtrees (nodes with odd shares) cross as they are.
        rounded = self._wire.rounds and len(additions) == 1
        part = self._local.slice_of(room)
        width = part.stop - part.start
        dtype = self._wire.dtype if rounded else room.out.dtype
        other = 1 - self._node
        arrived = room.out.new_empty(len(of_nodes.by_rank[other]), width, dtype=dtype)
        sent = [piece.to(dtype) for piece in sums]
        peer = other * self._local_size + self._everyone.rank % self._local_size
        with naming_the_wait(self._everyone.rank, f"the exchange with rank {peer} of node {other}"):
            works = [dist.isend(piece, peer, group=self._peers) for piece in sent if width]
            works += [dist.irecv(piece, peer, group=self._peers) for piece in arrived if width]
            for work in works:
                assert work is not None
                work.wait()
        theirs: list[torch.Tensor] = [piece.to(room.out.dtype) for piece in arrived]
        pieces = [*sums, *theirs] if self._node == 0 else [*theirs, *sums]
        for addition in additions:
            self._wire.add(pieces[addition.left], pieces[addition.right], at_root=addition.at_root)
        return pieces[root]

    def _through_all(self, sums: list[torch.Tensor], of_nodes: Pieces, room: Room) -> torch.Tensor:
        """More nodes: the slice is cut again, one part a node."""
        part = self._local.slice_of(room)
        out = sums[-1] if sums else room.out.new_empty(part.stop - part.start)
        self._over_gloo.exchange(Room(-1, out, sums[:-1]), of_nodes, 1.0)
        return out
