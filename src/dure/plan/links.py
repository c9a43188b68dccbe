"""Seconds of one all-reduce from the latency and the bandwidth of the links: the α-β model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dure.comm.tree import subtrees
from dure.data.shards import shards_of_rank

Collective = Literal["ring", "slices"]
"""`ring`: NCCL's, oneCCL's: over all ranks. `slices`: dure's: sums within each node through shared memory, then
every rank swaps its own slice between the nodes; two nodes send one bucket's bytes a direction."""


@dataclass(frozen=True)
class Link:
    """What a message takes: so long, and its bytes at this rate."""

    bytes_per_second: float
    hop_seconds: float = 0.0
    """Of one message from a rank to the next."""

    def seconds(self, nbytes: float, hops: float = 0.0) -> float:
        """Of so many bytes, handed on so often."""
        return nbytes / self.bytes_per_second + hops * self.hop_seconds


@dataclass(frozen=True)
class Shape:
    """Nodes with the same number of ranks on each."""

    nodes: int
    ranks: int
    """On each node."""
    pieces: int = 1
    """Subtrees of the sum that a node holds: more than one where its shards are no whole subtree."""

    @property
    def size(self) -> int:
        """All ranks."""
        return self.nodes * self.ranks


@dataclass(frozen=True)
class Links:
    """The links of a machine."""

    inside: Link
    """Between the ranks of a node: what one rank sends."""
    network: Link
    """Between nodes: what one node sends, all its ranks together."""
    call_seconds: float = 0.0
    """Of one all-reduce, whatever its size."""


def all_reduce_seconds(nbytes: float, shape: Shape, links: Links, collective: Collective) -> float:
    """Until every rank has the sum of so many bytes of all ranks; 0 for one rank."""
    if shape.size == 1:
        return 0.0
    if collective == "ring":
        return links.call_seconds + _ring(nbytes, shape, links)
    return links.call_seconds + _slices(nbytes, shape, links)


def sent_by_node(nbytes: float, shape: Shape, collective: Collective) -> float:
    """Bytes that each node sends to others in one all-reduce."""
    if shape.nodes == 1:
        return 0.0
    if collective == "ring":
        return 2.0 * (shape.size - 1) / shape.size * nbytes
    if shape.nodes == 2:  # each sends what it holds, and both add
        return shape.pieces * nbytes
    return (shape.pieces + 1.0) * (shape.nodes - 1) / shape.nodes * nbytes


def most_pieces(shards: int, nodes: int) -> int:
    """The most subtrees of the sum that one of so many nodes holds."""
    runs = (shards_of_rank(node, nodes, shards) for node in range(nodes))
    return max(1, *(len(subtrees(run, shards)) for run in runs))


def _ring(nbytes: float, shape: Shape, links: Links) -> float:
    """Twice around: 2(n-1) messages of a part each; of them, as NCCL counts, two a node go through the network."""
    each = 2.0 * (shape.size - 1) / shape.size * nbytes
    between = 2 * shape.nodes if shape.nodes > 1 else 0
    hops = 2 * (shape.size - 1) - between
    latency = max(0, hops) * links.inside.hop_seconds + between * links.network.hop_seconds
    slowest = links.inside.bytes_per_second
    if shape.nodes > 1:
        slowest = min(slowest, links.network.bytes_per_second)
    return each / slowest + latency


def _slices(nbytes: float, shape: Shape, links: Links) -> float:
    inside = links.inside.seconds(nbytes, 1) if shape.ranks > 1 else 0.0
    if shape.nodes == 1:
        return inside
    between = links.network.seconds(sent_by_node(nbytes, shape, "slices"), 2 * (shape.nodes - 1))
    return inside + between
