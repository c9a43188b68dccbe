"""The ranks that load together: which of them share memory, and how the others are reached."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from dure.comm.group import Group
from dure.comm.shm_counters import ShmCounters, line_bytes
from dure.comm.shm_segment import Offer, Segment, map_offer
from dure.weights.memory import POPULATE_WRITE
from dure.weights.windows import STAGING_BYTES

STAGING_START = mmap.PAGESIZE


@dataclass(frozen=True)
class LoadContext:
    """Where a rank stands in its team."""

    everyone: Group
    node: int
    local_rank: int
    deadline_seconds: float
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    """Process groups that earlier loads made, to be used again."""


@dataclass(frozen=True)
class LoadPeer:
    """What a rank tells the others of itself."""

    node: int
    local_rank: int
    pid: int
    offer: Sequence[int]
    """The memory it shares, if it is the one of its node that does."""


@dataclass(frozen=True)
class LoadGroup:
    """Ranks that load together, from one rank's place."""

    rank: int
    nodes: tuple[tuple[int, ...], ...]
    """All ranks, by the memory they share."""
    shared: mmap.mmap
    """The counters of up to 64 ranks, and from STAGING_START on the windows."""
    counters: ShmCounters
    between: dist.ProcessGroup | None
    """For the bytes between nodes: all ranks, used by the reading threads alone."""

    @property
    def size(self) -> int:
        """How many ranks."""
        return sum(map(len, self.nodes))

    def bringers(self, reader: int) -> list[int]:
        """Who brings a reader's windows, by node: itself on its own node, and on each other node the rank that has
        them sent by the reader, at the reader's place if there is one."""
        place = next(ranks.index(reader) for ranks in self.nodes if reader in ranks)
        return [reader if reader in ranks else ranks[place % len(ranks)] for ranks in self.nodes]

    def close(self) -> None:
        """Let go of the descriptors; the memory goes when nobody looks at it any more."""
        self.counters.close()


def new_segment() -> Segment:
    """Memory for the counters and for all windows; none of it is touched yet."""
    return Segment(STAGING_START + STAGING_BYTES)


def alone(deadline_seconds: float) -> LoadGroup:
    """A rank that loads for itself."""
    segment = new_segment()
    counters = ShmCounters(segment.bytes, 0, [os.getpid()], deadline_seconds)
    segment.close()
    return LoadGroup(0, ((0,),), segment.bytes, counters, None)


def shared_by(context: LoadContext, peers: Sequence[LoadPeer], segment: Segment | None) -> LoadGroup:
    """All ranks, the memory of each node shared by its ranks; raises OSError where that cannot be."""
    rank = context.everyone.rank
    by_node: dict[int, list[int]] = {}
    for other in sorted(range(len(peers)), key=lambda other: (peers[other].node, peers[other].local_rank)):
        by_node.setdefault(peers[other].node, []).append(other)
    nodes = tuple(tuple(ranks) for ranks in by_node.values())
    own = by_node[context.node]
    if line_bytes(len(own)) > STAGING_START:
        raise OSError(f"{len(own)} ranks on a node are more than {STAGING_START // line_bytes(1)}")
    shared = segment.bytes if segment is not None else map_offer(Offer(*peers[own[0]].offer))
    counters = ShmCounters(
        shared, own.index(rank), [peers[other].pid for other in own], context.deadline_seconds
    )
    return LoadGroup(rank, nodes, shared, counters, None)


def each_alone(context: LoadContext) -> LoadGroup:
    """All ranks, each as if it were a node of its own."""
    one = alone(context.deadline_seconds)
    nodes = tuple((rank,) for rank in range(context.everyone.size))
    return LoadGroup(context.everyone.rank, nodes, one.shared, one.counters, None)


def joined(load_group: LoadGroup, context: LoadContext) -> LoadGroup:
    """The group with a connection between its nodes; a collective call."""
    if len(load_group.nodes) == 1:
        return load_group
    if "between" not in context.groups:
        context.groups["between"] = dist.new_group(backend="gloo")
    return LoadGroup(
        load_group.rank, load_group.nodes, load_group.shared, load_group.counters, context.groups["between"]
    )


def fetch_pages(load_group: LoadGroup) -> None:
    """Have this rank's view of all windows' room in its page table at once, not page by page."""
    try:
        load_group.shared.madvise(POPULATE_WRITE)
    except OSError:
        return  # an older kernel: then each page is fetched when it is read
