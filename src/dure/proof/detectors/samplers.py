"""DistributedSampler: a forgotten set_epoch, ranks with other seeds, padding that is counted in an evaluation.

torch offers no hook for samplers: the class's `__iter__` and `set_epoch` are replaced by ones that look first
(`base/private_names.py` says so).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import DistributedSampler

from dure.proof.detectors.board import odd_ones, ranks_in_words
from dure.proof.detectors.report import Report, script_place

if TYPE_CHECKING:
    from dure.proof.detectors.watch import Watch

_PUBLISHED = 4
"""How many of a sampler's epochs are compared between ranks."""


@dataclass
class Reading:
    """A sampler's newest epoch."""

    number: int = 0
    """Epochs that were begun."""
    epoch: int = -1
    updates: int = 0
    """Updates of all models when it was begun."""
    was_set: bool = True
    """Whether set_epoch was called since the one before."""
    drawn: int = 0
    """Samples that this rank has taken."""
    samples: int = 0
    """Of this rank in an epoch."""


class SamplerLook:
    """Looks at all DistributedSamplers of the script."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._readings: weakref.WeakKeyDictionary[DistributedSampler[Any], Reading] = (
            weakref.WeakKeyDictionary()
        )
        self._made = 0
        self._numbers: weakref.WeakKeyDictionary[DistributedSampler[Any], int] = weakref.WeakKeyDictionary()
        self.training: Reading | None = None
        """Of the sampler that the script trains from right now."""

    def begin(self) -> None:
        """Put the looks in front of the class's own methods."""
        look, note = self._watch.guarded(self._look), self._watch.guarded(self._note)
        read, set_epoch = DistributedSampler.__iter__, DistributedSampler.set_epoch

        @functools.wraps(read)
        def looked_at(sampler: DistributedSampler[Any]) -> Iterator[Any]:
            look(sampler)
            indices = read(sampler)
            reading = self._readings.get(sampler) if self._watch.on else None
            return indices if reading is None else _Counted(indices, reading)

        @functools.wraps(set_epoch)
        def noted(sampler: DistributedSampler[Any], epoch: int) -> None:
            note(sampler)
            set_epoch(sampler, epoch)

        DistributedSampler.__iter__ = looked_at  # type: ignore[method-assign]
        DistributedSampler.set_epoch = noted  # type: ignore[method-assign, assignment]

    def _note(self, sampler: DistributedSampler[Any]) -> None:
        reading = self._readings.get(sampler)
        if reading is not None:
            reading.was_set = True

    def _look(self, sampler: DistributedSampler[Any]) -> None:
        watch, board = self._watch, self._watch.board
        if board is None:
            return
        if sampler not in self._numbers:
            self._numbers[sampler] = self._made
            self._made += 1
        before = self._readings.get(sampler)
        number = 1 if before is None else before.number + 1
        evaluates = watch.in_evaluation
        if evaluates:
            self._find_padding(sampler)
        elif before is not None:
            self._find_same_epoch(sampler, before)
        reading = Reading(number, sampler.epoch, watch.updates, was_set=False, samples=sampler.num_samples)
        self._readings[sampler] = reading
        if not evaluates:
            self.training = reading
        if number <= _PUBLISHED:
            facts = [sampler.seed, sampler.epoch, sampler.shuffle, sampler.num_replicas, sampler.rank]
            told = board.publish(f"sampler/{self._numbers[sampler]}/{number}", [facts, script_place()])
            if told is not None:
                self._find_overlap([facts for facts, _ in told], told[0][1])

    def _find_padding(self, sampler: DistributedSampler[Any]) -> None:
        held = len(sampler.dataset)  # type: ignore[arg-type]
        if sampler.drop_last or sampler.total_size <= held:
            return
        text = (
            f"an evaluation over {held} samples counts {sampler.total_size - held} of them twice: DistributedSampler "
            f"repeats samples until {sampler.num_replicas} ranks have as many each; give rank r the samples r, "
            f"r + {sampler.num_replicas}, … with torch.utils.data.Subset, and add up sums and counts "
            "(team.evaluate does)"
        )
        self._watch.tell(Report(text, "eval-padding", script_place()))

    def _find_same_epoch(self, sampler: DistributedSampler[Any], before: Reading) -> None:
        # A loader may be looked into before the loop: only what was trained on counts.
        trained = self._watch.updates > before.updates and before.drawn > 0
        if sampler.shuffle and not before.was_set and sampler.epoch == before.epoch and trained:
            text = (
                f"all ranks: epoch {before.number} has the same order as the one before, since set_epoch was not "
                "called "
                f"between them (the sampler is at epoch {sampler.epoch}); call sampler.set_epoch(epoch) before "
                "each epoch"
            )
            self._watch.tell(Report(text, "set-epoch", script_place()))

    def _find_overlap(self, facts: list[list[Any]], place: str) -> None:
        orders = [one[:3] for one in facts]
        shuffles = any(one[2] for one in facts)
        if shuffles and len({tuple(order) for order in orders}) > 1:
            odd = odd_ones(orders)
            values = ", ".join(
                f"rank {rank} {orders[rank][0]}/{orders[rank][1]}" for rank in range(len(orders))[:8]
            )
            text = (
                f"samplers shuffle differently on {ranks_in_words(odd)} (seed/epoch: {values}), so ranks overlap, "
                "and some "
                "samples are never read; give DistributedSampler the same seed, and set_epoch the same epoch, on "
                "all ranks"
            )
            self._watch.tell(Report(text, "overlap", place))
        parts = [(one[3], one[4]) for one in facts]
        if len(set(parts)) < len(parts):
            twice = [rank for rank, part in enumerate(parts) if parts.count(part) > 1]
            text = (
                f"{ranks_in_words(twice)} read the same samples: their DistributedSamplers have the same rank of "
                "as many "
                "replicas; leave num_replicas and rank out, or give dist.get_world_size() and dist.get_rank()"
            )
            self._watch.tell(Report(text, "overlap", place))


class _Counted(Iterator[Any]):
    """A sampler's indices; counts those that were taken."""

    def __init__(self, indices: Iterator[Any], reading: Reading) -> None:
        self._indices, self._reading = indices, reading

    def __next__(self) -> Any:
        index = next(self._indices)
        self._reading.drawn += 1
        return index
