"""The ranks that load together: which of them share memory, and how the others are reached."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field, replace

import torch.distributed as dist

from dure.comm.group import Group, group_of
from dure.comm.shm_barrier import LINE_BYTES, ShmCounters, line_bytes
from dure.comm.shm_segment import SharedSegment, share_or_none, share_segment
from dure.comm.topology import Topology
from dure.device.copying import POPULATE_WRITE
from dure.weights.windows import STAGING_BYTES

STAGING_START = mmap.PAGESIZE


@dataclass(frozen=True)
class LoadContext:
    """What a rank needs of its team to load."""

    everyone: Group
    topology: Topology
    deadline_seconds: float
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    """Process groups that earlier loads made, to be used again."""


@dataclass(frozen=True)
class LoadGroup:
    """Ranks that load together, from one rank's place."""

    rank: int
    nodes: tuple[tuple[int, ...], ...]
    """All ranks, by the memory they share."""
    segment: SharedSegment
    """The counters of up to 64 ranks, and from STAGING_START on the windows."""
    counters: ShmCounters
    between: dist.ProcessGroup | None = None
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
        self.segment.close()


def load_group_of(context: LoadContext) -> LoadGroup:
    """All ranks, the memory of each node shared by its ranks, and a connection between nodes; a collective call.

    Where one rank cannot share memory, each is as if it were a node of its own.
    """
    everyone = context.everyone
    load_group = share_or_none(
        everyone, lambda: _shared_by_node(context), "each rank loads for itself, same bits"
    )
    if load_group is None:
        alone = Group(None, 0, 1)
        segment = share_segment(alone, STAGING_START + STAGING_BYTES, "")
        nodes = tuple((rank,) for rank in range(everyone.size))
        counters = ShmCounters(segment, context.deadline_seconds)
        load_group = LoadGroup(everyone.rank, nodes, segment, counters)
    if len(load_group.nodes) == 1:
        return load_group
    if "between" not in context.groups:
        context.groups["between"] = group_of(None, context.deadline_seconds)
    return replace(load_group, between=context.groups["between"])


def _shared_by_node(context: LoadContext) -> LoadGroup:
    """Raises OSError where memory cannot be shared. None of the windows' memory is touched yet."""
    segment = share_segment(
        context.everyone,
        STAGING_START + STAGING_BYTES,
        "sharing memory for weights",
        node=context.topology.node,
        local_rank=context.topology.local_rank,
    )
    if line_bytes(len(segment.pids)) > STAGING_START:
        segment.close()
        raise OSError(f"{len(segment.pids)} ranks on a node are more than {STAGING_START // LINE_BYTES - 1}")
    counters = ShmCounters(segment, context.deadline_seconds)
    return LoadGroup(context.everyone.rank, segment.sharers, segment, counters)


def fetch_pages(load_group: LoadGroup) -> None:
    """Have this rank's view of all windows' room in its page table at once, not page by page."""
    try:
        load_group.segment.bytes.madvise(POPULATE_WRITE)
    except OSError:
        return  # an older kernel: then each page is fetched when it is read
