"""What ranks tell each other: values in the store that they met in, compared by whoever is the last to publish."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store


class Board:
    """Never waits: a rank publishes, and looks whether it was the last."""

    def __init__(self, store: Store, rank: int, size: int, name: str) -> None:
        self._store = PrefixStore(f"dure/watch/{name}", store)
        self.rank, self.size = rank, size

    def publish(self, key: str, value: Any) -> list[Any] | None:
        """Everyone's values by rank, if all are there; None for all but the last to come."""
        self._store.set(f"{key}/{self.rank}", json.dumps(value))
        keys = [f"{key}/{rank}" for rank in range(self.size)]
        if not self._store.check(keys):
            return None
        return [json.loads(text) for text in self._store.multi_get(keys)]

    def join(self, key: str) -> list[int]:
        """The ranks that have joined under this key so far, this one too; whoever joins last sees all."""
        self._store.set(f"{key}/{self.rank}", "")
        return [rank for rank in range(self.size) if self._store.check([f"{key}/{rank}"])]

    def claim(self, key: str) -> bool:
        """Whether this rank is the first to claim a key."""
        return bool(self._store.add(f"claimed/{key}", 1) == 1)


def board_of_world(name: str) -> Board | None:
    """Of the script's default process group, apart from boards of other names; None without one, or on one rank."""
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    group = dist.group.WORLD
    assert group is not None
    # A connection of its own: somebody may be waiting on the group's.
    return Board(
        group.get_group_store().clone(),  # type: ignore[attr-defined]
        dist.get_rank(),
        dist.get_world_size(),
        name,
    )


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Such as "ranks 0, 1 and 3"; no more than eight of them."""
    few = [str(rank) for rank in ranks[:8]]
    if len(ranks) > len(few):
        return f"ranks {', '.join(few)} and {len(ranks) - len(few)} more"
    return f"rank {few[0]}" if len(few) == 1 else f"ranks {', '.join(few[:-1])} and {few[-1]}"


def odd_ones(values: Sequence[Any]) -> list[int]:
    """The ranks whose value is not that of most; all of them where no value is most's."""
    told = [json.dumps(value) for value in values]
    most = max(set(told), key=told.count)
    if told.count(most) * 2 <= len(told):
        return list(range(len(told)))
    return [rank for rank, value in enumerate(told) if value != most]
