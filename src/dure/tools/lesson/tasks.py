"""What ranks do for a chapter: `dure run -m dure.tools.lesson.tasks TASK ARGUMENTS FOLDER`.

Each rank appends JSON lines to FOLDER/rank-N.jsonl; the lesson draws them, and "how do we know?" shows them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

import dure
from dure.base.files import open_own
from dure.device.fingerprint import fingerprint, named_weights
from dure.tools.lesson import parts


class Record:
    """One rank's lines; each is in the file when `row` returns."""

    def __init__(self, folder: Path, rank: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._rank = rank
        self._file = open(  # noqa: SIM115 - until the process ends
            open_own(folder / f"rank-{rank}.jsonl", flags), "a", encoding="utf-8", buffering=1
        )

    def row(self, **values: object) -> None:
        """Append one line."""
        print(json.dumps({"rank": self._rank, **values}), file=self._file)


def copies(folder: Path, how: Literal["seed", "broadcast"]) -> None:
    """Chapter 3: the same weights on every rank, from one seed or by broadcast from rank 0."""
    with dure.start(seed=42) as team:
        record = Record(folder, team.rank)
        torch.manual_seed(42 if how == "seed" else 100 + team.rank)
        module = torch.nn.Linear(3, 1, bias=False)
        record.row(at="made", **_seen(module))
        if how == "broadcast":
            dist.broadcast(module.weight.data, src=0)
            record.row(at="broadcast", **_seen(module))


def split(folder: Path, kind: Literal["interleaved", "blocks"], ranks: int) -> None:
    """Chapter 4: which of 400 photos each rank gets in one epoch."""
    with dure.start(seed=42, shards=ranks) as team:
        batches = team.batches(parts.photos(seed=1), global_batch=400, epochs=1, shuffle=False, split=kind)
        Record(folder, team.rank).row(ids=sorted(number for batch in batches for number in batch.ids))


def train(folder: Path, sync: bool, epochs: int = 6) -> None:
    """Chapter 5: three weights on 400 photos, with synchronisation or without; the weights after every step."""
    with dure.start(seed=42, shards=4, sync=sync) as team:
        record = Record(folder, team.rank)
        replica = team.replicate(parts.cat())
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.5)
        record.row(step=0, **_seen(replica.module))
        for batch in team.batches(
            parts.photos(seed=1), global_batch=80, epochs=epochs, shuffle=False, split="blocks"
        ):
            loss = team.step(replica, optimizer, batch, parts.logistic)
            record.row(step=batch.step + 1, loss=loss, **_seen(replica.module))
        found = team.evaluate(replica, parts.photos(seed=2, each=50), {"accuracy": parts.right}, batch=80)
        record.row(accuracy=found.metrics["accuracy"], **_seen(replica.module))


def _seen(module: torch.nn.Module) -> dict[str, Any]:
    weights = [value for _, tensor in named_weights(module) for value in tensor.flatten().tolist()]
    return {"weights": weights, "fingerprint": fingerprint(named_weights(module))}


TASKS: dict[str, Callable[..., None]] = {"copies": copies, "split": split, "train": train}

if __name__ == "__main__":
    TASKS[sys.argv[1]](Path(sys.argv[3]), **json.loads(sys.argv[2]))
