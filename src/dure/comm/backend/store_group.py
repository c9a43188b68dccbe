"""Small exchanges through a process group's store, while the group is being made."""

from __future__ import annotations

import json
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from dure.base.errors import PeerLost
from dure.comm.backend.channel import Channel
from dure.comm.group import Group
from dure.comm.same_node import node_identity
from dure.comm.shm_segment import share_or_none


class StoreGroup(Group):
    """The ranks of a group whose collectives are not there yet."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(None, rank, size)
        self._store = store
        self._timeout = timeout
        self._calls = 0

    def gather(self, value: str, what: str) -> list[str]:
        """See `Group`."""
        self._calls += 1
        keys = [f"dure/{self._calls}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], value)
        found = []
        for rank, key in enumerate(keys):
            try:
                self._store.wait([key], self._timeout)
            except dist.DistStoreError:
                seconds = self._timeout.total_seconds()
                raise PeerLost(
                    f"rank {self.rank} waited {seconds:.0f} s for rank {rank} of its process group in {what}; it never "
                    "came"
                ) from None
            found.append(self._store.get(key).decode())
        return found


def share_channel(group: StoreGroup, timeout: timedelta) -> Channel | None:
    """Shared memory for the group's ranks, if all are on one node and can."""
    told = [node_identity(), dist.get_rank() if dist.is_initialized() else group.rank]
    everyones = [json.loads(text) for text in group.gather(json.dumps(told), "finding nodes")]
    if len({node for node, _ in everyones}) > 1:
        return None
    ranks = [rank for _, rank in everyones]
    return share_or_none(
        group, lambda: Channel(group, ranks, timeout.total_seconds()), "collectives go over Gloo"
    )
