"""This rank's shards of each global batch, read ahead by workers, every sample seeded by its own place."""

from __future__ import annotations

import ctypes
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from dure.base.errors import UsageError
from dure.data.content import WithContents, content_of
from dure.data.dataset import SeededSamples
from dure.data.ledger import mark_of
from dure.data.seeds import seed_all, seed_of
from dure.data.shards import Split, parts_of, shards_of_rank

MANY_IDS = 64
"""Above this, a step's sample ids are recorded as a hash only."""


def content_mark(ids: Sequence[int], contents: Sequence[int]) -> int:
    """Hash of what samples contain, whatever their order; adds up."""
    pairs = zip(ids, contents, strict=True)
    return sum(content * (2 * sample + 1) for sample, content in pairs) & (1 << 64) - 1


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
    contents: tuple[int, ...]
    """Hashes of what `ids` contain, as they were read (see `content`)."""
    waited_seconds: float
    """Time the rank waited for the data."""
    source: Batches = field(repr=False, compare=False)
    """What it is of."""

    @property
    def content_mark(self) -> int:
        """Hash of what `ids` contain, whatever their order; those of ranks add up."""
        return content_mark(self.ids, self.contents)

    def content_mark_of(self, shard: int) -> int:
        """The same of one of this rank's shards."""
        wanted = next(one.ids for one in self.shards if one.shard == shard)
        first = sum(len(one.ids) for one in self.shards if one.shard < shard)
        return content_mark(wanted, self.contents[first : first + len(wanted)])

    @cached_property
    def mark(self) -> int:
        """Hash of `ids`; marks of ranks and steps add up."""
        return mark_of(self.ids)


@dataclass(frozen=True)
class BatchPlan:
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

    @property
    def smallest(self) -> tuple[int, int, int]:
        """(shard, micro-batch, samples) of one of an epoch's smallest micro-batches, in its last step."""
        step = self.split.steps - 1
        shard = self.split.active(step) - 1
        parts = parts_of(self.split.positions(step, shard), self.accumulate)
        return shard, len(parts) - 1, len(parts[-1])

    def parts(self, order: torch.Tensor, step: int, shard: int) -> list[list[int]]:
        """A shard's sample ids, in micro-batches."""
        return [
            order[positions.start : positions.stop : positions.step].tolist()
            for positions in parts_of(self.split.positions(step, shard), self.accumulate)
        ]


class Batches:
    """Iterates over this rank's batches, from a step on, across epochs."""

    def __init__(
        self,
        dataset: Dataset[Any],
        plan: BatchPlan,
        *,
        steps: int,
        start: int = 0,
        workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        place: str = "sample",
        cursor: Callable[[Batches], int] | None = None,
        pins: bool = False,
    ) -> None:
        """`cursor` says, when the iteration begins, at which step; without it, at `start`. With `pins` the tensors are
        in pinned memory, from which a device copies while the host goes on."""
        self.plan = plan
        self.steps = steps
        self._cursor = cursor
        self._start = start
        self._workers = workers
        self._begun = False
        self._dataset = dataset
        self._collate = collate
        self._place = place
        self._pins = pins
        self._keys = _Keys(plan, start, steps)
        self._loader: DataLoader[Any] = DataLoader(
            SeededSamples(dataset, plan.seed, place),
            batch_sampler=self._keys,
            num_workers=workers,
            collate_fn=WithContents(collate or default_collate),
            prefetch_factor=max(2, plan.accumulate * 2) if workers else None,
            worker_init_fn=_end_with_the_rank if workers else None,
            pin_memory=pins,
        )

    def __len__(self) -> int:
        return self.steps - self._start

    def first_only(self) -> Batches:
        """The run's first batch alone, wherever this session starts; read by this process itself."""
        return Batches(self._dataset, self.plan, steps=1, collate=self._collate)

    def common_part(self, step: int) -> Any:
        """The first micro-batch of shard 0 in a step: the same samples on whatever rank."""
        return self._part(step, 0, 0)

    def smallest_part(self) -> Any:
        """A micro-batch as small as any of an epoch; those of the last step are the smallest."""
        shard, micro, _ = self.plan.smallest
        return self._part(self.plan.split.steps - 1, shard, micro)

    def _part(self, step: int, shard: int, micro: int) -> Any:
        epoch, in_epoch = divmod(step, self.plan.split.steps)
        samples = SeededSamples(self._dataset, self.plan.seed, self._place)
        part = self.plan.parts(self.plan.order(epoch), in_epoch, shard)[micro]
        return (self._collate or default_collate)([samples[epoch, sample] for sample in part])

    def shard_again(self, step: int, shard: int) -> tuple[ShardBatch, tuple[int, ...]]:
        """One shard of a step, whichever rank's, read by this process now, and hashes of what its samples contain."""
        epoch, in_epoch = divmod(step, self.plan.split.steps)
        samples = SeededSamples(self._dataset, self.plan.seed, self._place)
        collate = WithContents(self._collate or default_collate)
        ids = self.plan.parts(self.plan.order(epoch), in_epoch, shard)
        read = [collate([samples[epoch, sample] for sample in part]) for part in ids]
        parts = tuple(batch for _, batch in read)
        whole = ShardBatch(shard, parts, tuple(sample for part in ids for sample in part))
        return whole, tuple(content for contents, _ in read for content in contents)

    def content(self, epoch: int, sample: int) -> int:
        """The hash of a sample as it is read now, for an epoch."""
        return content_of(SeededSamples(self._dataset, self.plan.seed, self._place)[epoch, sample])

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
            pins=self._pins,
        )

    def __iter__(self) -> Iterator[Batch]:
        if self._begun:
            raise UsageError(
                "these batches were used already; a second pass would repeat the first one's order and dropout. "
                "Ask for all epochs at once: team.batches(..., epochs=N)"
            )
        self._begun = True
        if self._cursor is not None:
            self._start = self._keys.start = min(self._cursor(self), self.steps)
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
            read = [[next(parts) for _ in of_shard] for of_shard in ids]
            shards = tuple(
                ShardBatch(
                    shard,
                    tuple(batch for _, batch in of_shard),
                    tuple(sample for part in samples for sample in part),
                )
                for shard, of_shard, samples in zip(own, read, ids, strict=True)
            )
            # What the user draws next, between two steps, is then the same on every rank.
            seed_all(seed_of(self.plan.seed, self._place, "batch", step))
            yield Batch(
                epoch=epoch,
                step=step,
                size=split.batch_size(in_epoch),
                active=split.active(in_epoch),
                shards=shards,
                idle=idle,
                ids=() if idle else tuple(sample for shard in shards for sample in shard.ids),
                contents=() if idle else tuple(one for part in read for found, _ in part for one in found),
                last_of_epoch=in_epoch == split.steps - 1,
                waited_seconds=time.perf_counter() - began,
                source=self,
            )


class _Keys:
    """The (epoch, sample) keys of every micro-batch of this rank, in the order they are used."""

    def __init__(self, plan: BatchPlan, start: int, steps: int) -> None:
        self._plan, self.start, self._steps = plan, start, steps

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        plan, known_epoch, order = self._plan, -1, torch.empty(0)
        for step in range(self.start, self._steps):
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
