"""The ranks that load together: which of them share memory, and how the others are reached."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from dure.exchange.counters import Counters, line_bytes
from dure.exchange.group import Group
from dure.exchange.segment import Offer, Segment, map_offer
from dure.loading.windows import WINDOW_BYTES

SLOTS = 3
"""Windows in memory at a time: one is read, one comes from other nodes, one is copied."""
SLOT_BYTES = WINDOW_BYTES
_POPULATE_WRITE = getattr(mmap, "MADV_POPULATE_WRITE", 23)


@dataclass(frozen=True)
class Standing:
    """Where a rank stands in its team."""

    everyone: Group
    node: int
    local_rank: int
    deadline_seconds: float
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    """Process groups that earlier loads made, to be used again."""


@dataclass(frozen=True)
class Seat:
    """What a rank tells the others of itself."""

    node: int
    local_rank: int
    pid: int
    offer: Sequence[int]
    """The memory it shares, if it is the one of its node that does."""


@dataclass(frozen=True)
class Circle:
    """Ranks that load together, from one rank's place."""

    rank: int
    nodes: tuple[tuple[int, ...], ...]
    """All ranks, by the memory they share."""
    shared: mmap.mmap
    counters: Counters
    between: dist.ProcessGroup | None
    """For the bytes between nodes: all ranks, used by the reading threads alone."""

    @property
    def size(self) -> int:
        """How many ranks."""
        return sum(map(len, self.nodes))

    def slot(self, number: int) -> int:
        """Where in the shared memory a window's room starts."""
        return mmap.PAGESIZE + number * SLOT_BYTES

    def receivers(self, reader: int) -> list[int]:
        """Who fetches a reader's parts: one rank on each other node, at the reader's own place if there is one."""
        own = next(ranks for ranks in self.nodes if reader in ranks)
        place = own.index(reader)
        return [ranks[place % len(ranks)] for ranks in self.nodes if ranks is not own]

    def close(self) -> None:
        """Let go of the descriptors; the memory goes when nobody looks at it any more."""
        self.counters.close()


def new_segment() -> Segment:
    """Memory for the counters of up to 64 ranks and for all windows."""
    return Segment(mmap.PAGESIZE + SLOTS * SLOT_BYTES)


def alone(deadline_seconds: float) -> Circle:
    """A rank that loads for itself."""
    segment = new_segment()
    counters = Counters(segment.bytes, 0, [os.getpid()], deadline_seconds)
    segment.close()
    return Circle(0, ((0,),), segment.bytes, counters, None)


def shared_by(standing: Standing, seats: Sequence[Seat], segment: Segment | None) -> Circle:
    """All ranks, the memory of each node shared by its ranks; raises OSError where that cannot be."""
    rank = standing.everyone.rank
    by_node: dict[int, list[int]] = {}
    for other in sorted(range(len(seats)), key=lambda other: (seats[other].node, seats[other].local_rank)):
        by_node.setdefault(seats[other].node, []).append(other)
    nodes = tuple(tuple(ranks) for ranks in by_node.values())
    own = by_node[standing.node]
    if line_bytes(len(own)) > mmap.PAGESIZE:
        raise OSError(f"{len(own)} ranks on a node are more than {mmap.PAGESIZE // line_bytes(1)}")
    shared = segment.bytes if segment is not None else map_offer(Offer(*seats[own[0]].offer))
    counters = Counters(
        shared, own.index(rank), [seats[other].pid for other in own], standing.deadline_seconds
    )
    return Circle(rank, nodes, shared, counters, None)


def each_alone(standing: Standing) -> Circle:
    """All ranks, each as if it were a node of its own."""
    one = alone(standing.deadline_seconds)
    nodes = tuple((rank,) for rank in range(standing.everyone.size))
    return Circle(standing.everyone.rank, nodes, one.shared, one.counters, None)


def joined(circle: Circle, standing: Standing) -> Circle:
    """The circle with a way between its nodes; a collective call."""
    if len(circle.nodes) == 1:
        return circle
    if "between" not in standing.groups:
        standing.groups["between"] = dist.new_group(backend="gloo")
    return Circle(circle.rank, circle.nodes, circle.shared, circle.counters, standing.groups["between"])


def fetch_pages(circle: Circle) -> None:
    """Have this rank's view of all windows' room in its page table at once, not page by page."""
    try:
        circle.shared.madvise(_POPULATE_WRITE)
    except OSError:
        return  # an older kernel: then each page is fetched when it is read
