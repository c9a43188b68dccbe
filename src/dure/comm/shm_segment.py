"""Shared memory without a name: no crash can leave any behind.

A segment is a memfd, or the unlinked file behind `share_memory_`. Other processes of the same user map it
through `/proc/<pid>/fd/<fd>`; the kernel frees it when the last of them is gone.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from dure.base.say import say
from dure.comm.group import Group


@dataclass(frozen=True)
class Offer:
    """Where another process finds a segment."""

    pid: int
    descriptor: int
    nbytes: int

    def as_list(self) -> list[int]:
        """For JSON."""
        return [self.pid, self.descriptor, self.nbytes]


class Segment:
    """A piece of memory that this process made and others may map."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = max(nbytes, mmap.PAGESIZE)
        self._descriptor = os.memfd_create("dure", os.MFD_CLOEXEC)
        os.fchmod(self._descriptor, 0o600)
        os.ftruncate(self._descriptor, self.nbytes)
        self.bytes = mmap.mmap(self._descriptor, self.nbytes)

    def offer(self) -> Offer:
        """What peers need to map it."""
        return Offer(os.getpid(), self._descriptor, self.nbytes)

    def tensor(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """The segment's first elements."""
        return torch.frombuffer(self.bytes, dtype=dtype, count=numel)

    def close(self) -> None:
        """Let go of the descriptor; mappings live as long as tensors look at them."""
        os.close(self._descriptor)


def offer_tensor(tensor: torch.Tensor) -> Offer:
    """Move a tensor's storage into shared memory, in place: all views of it move along."""
    tensor.share_memory_()
    descriptor, nbytes = tensor.untyped_storage()._share_fd_cpu_()
    return Offer(os.getpid(), descriptor, nbytes)


def map_offer(offer: Offer) -> mmap.mmap:
    """Map another process's segment."""
    descriptor = os.open(f"/proc/{offer.pid}/fd/{offer.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, offer.nbytes)
    finally:
        os.close(descriptor)


def map_everyones(group: Group, own: Sequence[Offer], what: str) -> list[list[mmap.mmap]]:
    """Each peer's offers, mapped into this process, by rank; nothing for this rank itself. A collective call.

    Raises OSError on a rank that cannot map one of them.
    """
    told = group.gather(json.dumps([offer.as_list() for offer in own]), what)
    return [
        [] if rank == group.rank else [map_offer(Offer(*offer)) for offer in json.loads(text)]
        for rank, text in enumerate(told)
    ]


@dataclass(frozen=True)
class SharedSegment:
    """One segment that several ranks have mapped; zeroed when it is new."""

    bytes: mmap.mmap
    rank: int
    """This rank's position among those that share it."""
    pids: tuple[int, ...]
    """The processes that share it, by position."""
    sharers: tuple[tuple[int, ...], ...]
    """All ranks of the group, by the segment they share; in each in order of position."""
    own: Segment | None
    """What this process made, if it is the one that did."""

    def close(self) -> None:
        """Let go of the descriptor, when all have mapped it; the memory lives as long as something looks at it."""
        if self.own is not None:
            self.own.close()


def share_segment(
    group: Group, nbytes: int, what: str, *, node: int = 0, local_rank: int | None = None
) -> SharedSegment:
    """One new segment for the ranks of each node, made by the first of them. A collective call of `group`.

    Without `node` and `local_rank`, all ranks of the group share one. Raises OSError on all ranks where a segment
    cannot be made, and on a rank that cannot map it: call it within `share_or_none`, and nothing collective after it.
    """
    position = group.rank if local_rank is None else local_rank
    own, trouble = None, ""
    if position == 0:
        try:
            own = Segment(nbytes)
        except (OSError, AttributeError) as error:  # AttributeError: not Linux
            trouble = str(error)
    offer = own.offer().as_list() if own is not None else []
    told = group.gather(json.dumps([node, position, os.getpid(), offer, trouble]), what)
    everyones = [json.loads(text) for text in told]
    failed = next((rank for rank, (*_, words) in enumerate(everyones) if words), None)
    if failed is not None:
        if own is not None:
            own.close()
        raise OSError(f"rank {failed} cannot make shared memory: {everyones[failed][-1]}")
    by_node: dict[int, list[int]] = {}
    for rank in sorted(range(group.size), key=lambda rank: everyones[rank][:2]):
        by_node.setdefault(everyones[rank][0], []).append(rank)
    ranks = by_node[node]
    mapped = own.bytes if own is not None else map_offer(Offer(*everyones[ranks[0]][3]))
    pids = tuple(everyones[rank][2] for rank in ranks)
    return SharedSegment(mapped, ranks.index(group.rank), pids, tuple(map(tuple, by_node.values())), own)


class _Closes(Protocol):
    def close(self) -> None: ...


_Made = TypeVar("_Made", bound=_Closes)


def share_or_none(group: Group, make: Callable[[], _Made], instead: str) -> _Made | None:
    """What `make` makes; None, on all ranks, where one of them cannot share memory: rank 0 then says why, and what is
    done `instead`. A collective call."""
    made: _Made | None = None
    trouble = ""
    try:
        made = make()
    except (OSError, AttributeError) as error:  # no /proc, no memfd, no futex, another pid namespace
        trouble = str(error) or type(error).__name__
    everyones = group.gather(trouble, "sharing memory")
    if not any(everyones):
        return made
    if made is not None:
        made.close()
    if group.rank == 0:
        rank, why = next((rank, why) for rank, why in enumerate(everyones) if why)
        say(f"rank {rank} cannot share memory ({why}); {instead}")
    return None
