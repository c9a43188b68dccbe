"""The dataset as ranks read it: a known length, and every sample seeded by its own number."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from dure.base.errors import JobError, ModelRefused
from dure.data.seeds import seed_all, seed_of


class SeededSamples(Dataset[Any]):
    """Reads a sample with every global generator seeded by (seed, epoch, sample): so that neither the
    number of ranks nor that of workers can change an augmentation."""

    def __init__(self, dataset: Dataset[Any], seed: int, place: str) -> None:
        self._dataset = dataset
        self._seed = seed
        self._place = place

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, sample = key
        seed_all(seed_of(self._seed, self._place, epoch, sample))
        return self._dataset[sample]


def length_of(dataset: object, key: str) -> int:
    """The dataset's length, or an error that says why it cannot be used; `key` names it."""
    if isinstance(dataset, IterableDataset):
        raise ModelRefused(
            f"{key}: {type(dataset).__name__} is an iterable dataset; a rank cannot jump to its own samples in it, so "
            "neither the split nor a resume could be exact. Give a map-style dataset (__len__ and __getitem__)"
        )
    if not hasattr(dataset, "__getitem__") or not isinstance(dataset, Sized):
        raise JobError(
            f"{key}: a {type(dataset).__name__} is not a dataset; it needs __len__ and __getitem__"
        )
    if len(dataset) == 0:
        raise JobError(f"{key}: the dataset is empty; there is nothing to train on")
    return len(dataset)
