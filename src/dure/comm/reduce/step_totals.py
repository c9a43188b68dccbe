"""The few numbers of a step that all ranks learn before their gradients are added."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dure.base.errors import UsageError

_HALF, _MASK = (1 << 32) - 1, (1 << 64) - 1


@dataclass
class StepTotals:
    """What all ranks know about a step once its losses met."""

    losses: list[float]
    """Sum of losses, by shard."""
    counts: list[float]
    """Number of things (samples, tokens) those sums are over, by shard."""
    flags: list[int]
    """By rank: what it asks for besides (bits)."""
    steps: list[int]
    """By rank: the step that it is in."""
    samples: int = 0
    """Of all ranks."""
    mark: int = 0
    """Hash of those samples: the ranks' own, added up (mod 2⁶⁴)."""
    _noted: list[tuple[int, torch.Tensor, float | torch.Tensor]] = field(default_factory=list)
    """(shard, loss, count), not looked at yet."""

    @classmethod
    def empty(cls, shards: int, ranks: int) -> StepTotals:
        """Before anything was computed."""
        return cls([0.0] * shards, [0.0] * shards, [0] * ranks, [0] * ranks)

    @staticmethod
    def numbers(shards: int, ranks: int) -> int:
        """How many numbers are exchanged."""
        return 2 * shards + 2 * ranks + 3

    def note(self, shard: int, loss: torch.Tensor, count: float | torch.Tensor) -> None:
        """Add a micro-batch's loss and count to its shard's; nobody waits for a device here."""
        if loss.is_cpu:
            self.losses[shard] += loss.item()
            self.counts[shard] += float(count)
        else:
            self._noted.append((shard, loss.detach(), count))

    def look(self) -> None:
        """Add up what was noted, in that order, in double precision: one wait for all that a device computed."""
        if not self._noted:
            return
        shards, losses, counts = zip(*self._noted, strict=True)
        self._noted.clear()
        for shard, loss, count in zip(shards, numbers_of(losses), numbers_of(counts), strict=True):
            self.losses[shard] += loss
            self.counts[shard] += count

    @property
    def count(self) -> float:
        """Over all shards; exact, since the counts are whole numbers."""
        return sum(self.counts)

    def as_vector(self) -> torch.Tensor:
        """All numbers; every rank fills its own places, the others stand at 0. Those of the samples add up, exactly: a
        mark comes in two halves."""
        self.look()
        samples = (self.samples, self.mark >> 32, self.mark & _HALF)
        return torch.tensor(
            [*self.losses, *self.counts, *self.flags, *self.steps, *samples], dtype=torch.float64
        )

    def take(self, vector: torch.Tensor) -> None:
        """Replace this rank's numbers by those of all ranks."""
        shards, ranks, told = len(self.losses), len(self.flags), vector.tolist()
        self.losses, self.counts = told[:shards], told[shards : 2 * shards]
        rest = [int(number) for number in told[2 * shards :]]
        self.flags, self.steps = rest[:ranks], rest[ranks : 2 * ranks]
        self.samples, high, low = rest[2 * ranks :]
        self.mark = ((high << 32) + low) & _MASK

    def refuse_other_steps(self) -> None:
        """Raise UsageError, on all ranks alike, unless all are in the same step."""
        if len(set(self.steps)) == 1:
            return
        most, _ = Counter(self.steps).most_common(1)[0]
        odd = ", ".join(
            f"rank {rank} is in step {step}" for rank, step in enumerate(self.steps) if step != most
        )
        raise UsageError(
            f"{odd}, the others are in step {most}: every rank must take every batch of team.batches, in order; do not "
            "skip, repeat or sort them"
        )


def numbers_of(values: Sequence[float | torch.Tensor]) -> list[float]:
    """As Python's own numbers; those on a device come in one copy."""
    away = [value for value in values if isinstance(value, torch.Tensor) and not value.is_cpu]
    together = torch.stack([value.to(torch.float64) for value in away]).tolist() if away else []
    told = iter(together)
    return [
        next(told) if isinstance(value, torch.Tensor) and not value.is_cpu else float(value)
        for value in values
    ]
