"""A team's way to load: from the words of a job or a script to `load`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import nn

from dure.data.seeds import seed_all
from dure.observe.heartbeat import Heartbeat, Phase
from dure.storage import open_store
from dure.weights.load import FromConfig, How, Loaded, Progress, load
from dure.weights.load_group import LoadContext

Model = nn.Module | Callable[[], nn.Module] | Mapping[str, Any]
"""A module, a function that makes one, or what `from_pretrained` takes."""


class Loader:
    """This rank's part in loading pretrained weights."""

    def __init__(self, context: LoadContext, seed: int, device: torch.device, heartbeat: Heartbeat) -> None:
        self._context = context
        self._seed = seed
        self._device = device
        self._heartbeat = heartbeat

    def load(
        self,
        model: Model,
        weights: str,
        *,
        how: How = "slices",
        strict: bool = True,
        storage: str | Path = ".",
        progress: Progress | None = None,
    ) -> Loaded:
        """See `Team.load`. `progress` is told the bytes that are here, and how many there are."""
        location, path = place_of(weights, str(storage))

        def alive(done: int, total: int) -> None:
            self._heartbeat.beat(0, Phase.LOADING)  # a long load is not a hang
            if progress is not None:
                progress(done, total)

        loaded = load(
            FromConfig(model) if isinstance(model, Mapping) else model,
            lambda: open_store(location, read_only=True),
            path,
            self._context,
            how=how,
            strict=strict,
            progress=alive,
            device=self._device,
        )
        # What is drawn next does not depend on how much building the model drew.
        seed_all(self._seed)
        return loaded


def place_of(weights: str, storage: str) -> tuple[str, str]:
    """The storage to open, and the path in it: `weights` may be a path in `storage`, an absolute one, or s3://…."""
    if "://" in weights:
        scheme, _, rest = weights.partition("://")
        above, _, name = rest.rstrip("/").rpartition("/")
        return (f"{scheme}://{above}", name) if above else (weights, ".")
    path = PurePosixPath(weights)
    return (str(path.parent), path.name) if path.is_absolute() else (storage, weights)
