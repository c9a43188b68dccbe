"""One box of bytes a rank that all ranks of a group read: how what each computed alone reaches the others."""

from __future__ import annotations

import json
from typing import Protocol

import torch
import torch.distributed as dist

from dure.comm.group import Group, naming_the_wait
from dure.comm.shm_barrier import ShmBarrier
from dure.comm.shm_segment import Offer, Segment, map_offer


class Outboxes(Protocol):
    """Everyone's boxes. Used by one thread."""

    @property
    def turns(self) -> int:
        """How many sets of boxes are used in turn."""
        ...

    def boxes(self, turn: int) -> list[torch.Tensor]:
        """Each rank's box, by rank; always the same tensors. A rank writes to its own only."""
        ...

    def deliver(self, turn: int, what: str) -> None:
        """Return when everyone's box of this turn can be read here; raises PeerLost, naming who is missing."""
        ...

    def close(self) -> None:
        """Let go of whatever is shared."""
        ...


class SharedBoxes:
    """Boxes in shared memory. They are read where they were written, and the only cost is one barrier.

    There are two sets, used in turn: who writes to a box has met everyone since it was last read.
    """

    turns = 2

    def __init__(self, group: Group, nbytes: int, deadline_seconds: float) -> None:
        """Raises OSError where memory cannot be shared; on all ranks or on none."""
        self._barrier = ShmBarrier(group, 0, deadline_seconds)
        self._own = Segment(self.turns * max(nbytes, 1))
        told = group.gather(json.dumps(self._own.offer().as_list()), "sharing updated parameters")
        maps = [
            self._own.bytes if rank == group.rank else map_offer(Offer(*json.loads(text)))
            for rank, text in enumerate(told)
        ]
        whole = [torch.frombuffer(mapped, dtype=torch.uint8, count=self.turns * nbytes) for mapped in maps]
        self._boxes = [
            [box[turn * nbytes : (turn + 1) * nbytes] for box in whole] for turn in range(self.turns)
        ]

    def boxes(self, turn: int) -> list[torch.Tensor]:
        """See `Outboxes`."""
        return self._boxes[turn]

    def deliver(self, turn: int, what: str) -> None:
        """See `Outboxes`."""
        self._barrier.wait(what)

    def close(self) -> None:
        """See `Outboxes`."""
        self._boxes.clear()
        self._own.close()
        self._barrier.close()


class GatheredBoxes:
    """Boxes in memory of this process, gathered by the backend."""

    turns = 1

    def __init__(self, group: Group, nbytes: int, device: torch.device) -> None:
        self._group = group
        self._all = torch.zeros(group.size * nbytes, dtype=torch.uint8, device=device)
        self._own = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._boxes = list(self._all.split(nbytes)) if nbytes else [self._own] * group.size
        self._boxes[group.rank] = self._own

    def boxes(self, turn: int) -> list[torch.Tensor]:
        """See `Outboxes`."""
        return self._boxes

    def deliver(self, turn: int, what: str) -> None:
        """See `Outboxes`."""
        with naming_the_wait(self._group.rank, what):
            dist.all_gather_single(self._all, self._own, group=self._group.group)

    def close(self) -> None:
        """See `Outboxes`."""
