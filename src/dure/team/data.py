"""What a team reads: batches to train on, and batches to judge a model by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import Dataset

from dure.base.errors import UsageError
from dure.comm.group import Group
from dure.comm.topology import Topology
from dure.data.batches import Batch, Batches, BatchPlan
from dure.data.shards import Split, SplitKind
from dure.device.accelerator import is_host
from dure.observe.heartbeat import Heartbeat, Phase
from dure.step.dataset_check import check_dataset
from dure.step.forward import Setting

Collate = Callable[[list[Any]], Any] | None
Fresh = Callable[[], Dataset[Any]] | None
_PLACE = "eval sample"


class TeamData:
    """Splits datasets; each is looked at when it is used for the first time."""

    def __init__(self, topology: Topology, setting: Setting, group: Group, heartbeat: Heartbeat) -> None:
        self._topology = topology
        self._setting = setting
        self._group = group
        self._heartbeat = heartbeat
        self._pins = not is_host(setting.device)
        self._evaluated: dict[int, tuple[Dataset[Any], int]] = {}
        """Evaluation data that was looked at, and its length."""

    def split(
        self,
        dataset: Dataset[Any],
        global_batch: int,
        kind: SplitKind,
        *,
        drop_last: bool,
        fresh: Fresh,
        name: str,
    ) -> Split:
        """How a training set falls into steps and shards; a collective call."""
        samples = check_dataset(dataset, name, self._setting.seed, self._group, fresh=fresh)
        cut = Split(samples, global_batch, self._setting.shards, kind, drop_last)
        if cut.steps == 0:
            raise UsageError(
                f"{name} has {samples} samples, less than one batch of {global_batch}, and drop_last leaves none; use "
                "a smaller global_batch"
            )
        return cut

    def batches(
        self,
        dataset: Dataset[Any],
        cut: Split,
        *,
        steps: int,
        shuffle: bool,
        workers: int,
        accumulate: int,
        collate: Collate,
        cursor: Callable[[Batches], int] | None,
    ) -> Batches:
        """This rank's shards of every batch; `cursor` tells the first step when they are begun."""
        rank, ranks, seed = self._topology.rank, self._topology.size, self._setting.seed
        plan = BatchPlan(cut, rank, ranks, seed, shuffle, accumulate)
        return Batches(
            dataset, plan, steps=steps, workers=workers, collate=collate, cursor=cursor, pins=self._pins
        )

    def eval_batches(
        self,
        dataset: Dataset[Any],
        batch: int,
        workers: int,
        collate: Collate,
        fresh: Fresh = None,
        name: str = "the evaluation data",
    ) -> Batches:
        """This rank's shards of the evaluation data, in order, once; a collective call."""
        seed = self._setting.seed
        if id(dataset) not in self._evaluated:
            samples = check_dataset(dataset, name, seed, self._group, place=_PLACE, fresh=fresh)
            self._evaluated[id(dataset)] = (dataset, samples)
        cut = Split(self._evaluated[id(dataset)][1], batch, self._setting.shards)
        rank, ranks = (self._topology.rank, self._topology.size) if self._setting.sync else (0, 1)
        plan = BatchPlan(cut, rank, ranks, seed, shuffle=False)
        return Batches(
            dataset, plan, steps=cut.steps, workers=workers, collate=collate, place=_PLACE, pins=self._pins
        )

    def alive(self, batches: Batches) -> Iterator[Batch]:
        """The batches, with a beat for each: a long evaluation is not a hang."""
        for batch in batches:
            self._heartbeat.beat(-1, Phase.EVALUATE)
            yield batch
