"""This rank's shards of each global batch, read ahead by workers, every sample seeded by its own place."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from dure.errors import JobError, ModelRefused, UsageError
from dure.fingerprint import fingerprint
from dure.seeds import plant, seed_of
from dure.shards import Split, parts_of, shards_of_rank

MANY_IDS = 512
"""Above this, a step's sample ids are recorded as a hash only."""


@dataclass(frozen=True)
class ShardBatch:
    """One shard's samples, in micro-batches."""

    shard: int
    parts: tuple[Any, ...]
    ids: tuple[int, ...]
    """Its samples."""


@dataclass(frozen=True)
class Batch:
    """What this rank computes of one global batch."""

    epoch: int
    step: int
    """Counted over the whole run."""
    size: int
    """Samples of all ranks."""
    active: int
    """Shards with samples, of all ranks; they are the first ones."""
    shards: tuple[ShardBatch, ...]
    """This rank's shards; on an idle rank shard 0's, to be computed and dropped."""
    idle: bool
    """This rank has no shard with samples, and only keeps the others company."""
    ids: tuple[int, ...]
    """The samples of this rank."""
    last_of_epoch: bool
    waited_seconds: float
    """Time the rank waited for the data."""

    @property
    def mark(self) -> int:
        """Hash of `ids`; marks of ranks and steps add up."""
        return mark_of(self.ids)


@dataclass(frozen=True)
class Plan:
    """Which samples, in which order, on which rank: everything but the data itself."""

    split: Split
    rank: int
    ranks: int
    seed: int
    shuffle: bool = True
    accumulate: int = 1

    def order(self, epoch: int) -> torch.Tensor:
        """The epoch's order of samples, the same on all ranks."""
        if not self.shuffle:
            return torch.arange(self.split.samples)
        generator = torch.Generator().manual_seed(seed_of(self.seed, "order", epoch))
        return torch.randperm(self.split.samples, generator=generator)

    def own_shards(self, step: int) -> tuple[range, bool]:
        """The shards this rank computes in a step of an epoch, and whether it is idle."""
        active = self.split.active(step)
        run = shards_of_rank(self.rank, self.ranks, self.split.shards)
        own = range(run.start, min(run.stop, active))
        return (own, False) if own else (range(1), True)

    def parts(self, order: torch.Tensor, step: int, shard: int) -> list[list[int]]:
        """A shard's sample ids, in micro-batches."""
        return [
            order[positions.start : positions.stop : positions.step].tolist()
            for positions in parts_of(self.split.positions(step, shard), self.accumulate)
        ]


def mark_of(ids: Sequence[int]) -> int:
    """The sum of `ledger_mark` over many samples at once; it is on the training thread's way."""
    with numpy.errstate(over="ignore"):
        marks = numpy.array(ids, dtype=numpy.uint64) + numpy.uint64(0x9E3779B97F4A7C15)
        marks = (marks ^ (marks >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        marks = (marks ^ (marks >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
        return int((marks ^ (marks >> numpy.uint64(31))).sum(dtype=numpy.uint64))


class Batches:
    """Iterates over this rank's batches, from a step on, across epochs."""

    def __init__(
        self,
        dataset: Dataset[Any],
        plan: Plan,
        *,
        steps: int,
        start: int = 0,
        workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        place: str = "sample",
    ) -> None:
        self.plan = plan
        self.steps = steps
        self._start = start
        self._workers = workers
        self._begun = False
        self._dataset = dataset
        self._collate = collate
        self._place = place
        self._loader: DataLoader[Any] = DataLoader(
            _SeededSamples(dataset, plan.seed, place),
            batch_sampler=_Keys(plan, start, steps),
            num_workers=workers,
            collate_fn=collate or default_collate,
            prefetch_factor=max(2, plan.accumulate * 2) if workers else None,
            worker_init_fn=_end_with_the_rank if workers else None,
        )

    def __len__(self) -> int:
        return self.steps - self._start

    def first_only(self) -> Batches:
        """The run's first batch alone, wherever this session starts; read by this process itself."""
        return Batches(self._dataset, self.plan, steps=1, collate=self._collate)

    def starting_at(self, step: int) -> Batches:
        """The same batches from a step on: the cursor is the only state that data has."""
        return Batches(
            self._dataset,
            self.plan,
            steps=self.steps,
            start=min(step, self.steps),
            workers=self._workers,
            collate=self._collate,
            place=self._place,
        )

    def __iter__(self) -> Iterator[Batch]:
        if self._begun:
            raise UsageError(
                "these batches were used already; a second pass would repeat the first one's order and dropout. "
                "Ask for all epochs at once: team.batches(..., epochs=N)"
            )
        self._begun = True
        parts = iter(self._loader)
        order, known_epoch = torch.empty(0), -1
        split = self.plan.split
        for step in range(self._start, self.steps):
            epoch, in_epoch = divmod(step, split.steps)
            if epoch != known_epoch:
                order, known_epoch = self.plan.order(epoch), epoch
            own, idle = self.plan.own_shards(in_epoch)
            ids = [self.plan.parts(order, in_epoch, shard) for shard in own]
            began = time.perf_counter()
            shards = tuple(
                ShardBatch(
                    shard,
                    tuple(next(parts) for _ in of_shard),
                    tuple(sample for part in of_shard for sample in part),
                )
                for shard, of_shard in zip(own, ids, strict=True)
            )
            # What the user draws next, between two steps, is then the same on every rank.
            plant(seed_of(self.plan.seed, self._place, "batch", step))
            yield Batch(
                epoch=epoch,
                step=step,
                size=split.batch_size(in_epoch),
                active=split.active(in_epoch),
                shards=shards,
                idle=idle,
                ids=() if idle else tuple(sample for shard in shards for sample in shard.ids),
                last_of_epoch=in_epoch == split.steps - 1,
                waited_seconds=time.perf_counter() - began,
            )


def check_dataset(dataset: object, key: str, seed: int) -> int:
    """The dataset's length, or an error that says why it cannot be used."""
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
    samples = _SeededSamples(dataset, seed, "sample")  # type: ignore[arg-type]
    if _sample_bits(samples[0, 0]) != _sample_bits(samples[0, 0]):
        raise ModelRefused(
            f"{key}: sample 0, read twice, gives other bits; draw augmentation from the global generators of torch, "
            "numpy or random, which are seeded by (seed, epoch, sample)"
        )
    return len(dataset)


def _sample_bits(sample: object) -> str:
    """A fingerprint of all tensors and numbers in a sample."""

    def tensors(value: object, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(value, dict):
            for key in sorted(value):
                yield from tensors(value[key], f"{name}.{key}")
        elif isinstance(value, list | tuple):
            for at, inner in enumerate(value):
                yield from tensors(inner, f"{name}.{at}")
        else:
            with contextlib.suppress(TypeError, ValueError, RuntimeError):
                yield name, torch.as_tensor(value)

    return fingerprint(tensors(sample, ""))


class _SeededSamples(Dataset[Any]):
    """Reads a sample with every global generator seeded by (seed, epoch, sample): so that neither the
    number of ranks nor that of workers can change an augmentation."""

    def __init__(self, dataset: Dataset[Any], seed: int, place: str) -> None:
        self._dataset = dataset
        self._seed = seed
        self._place = place

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, sample = key
        plant(seed_of(self._seed, self._place, epoch, sample))
        return self._dataset[sample]


class _Keys:
    """The (epoch, sample) keys of every micro-batch of this rank, in the order they are used."""

    def __init__(self, plan: Plan, start: int, steps: int) -> None:
        self._plan, self._start, self._steps = plan, start, steps

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        plan, known_epoch, order = self._plan, -1, torch.empty(0)
        for step in range(self._start, self._steps):
            epoch, in_epoch = divmod(step, plan.split.steps)
            if epoch != known_epoch:
                order, known_epoch = plan.order(epoch), epoch
            for shard in plan.own_shards(in_epoch)[0]:
                for part in plan.parts(order, in_epoch, shard):
                    yield [(epoch, sample) for sample in part]


def _end_with_the_rank(_worker: int) -> None:
    """A worker must not outlive its rank, however that ends."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    torch.set_num_threads(1)
