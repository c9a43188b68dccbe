"""Which checkpoints may go. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay."""

    last: int = 2
    every: int = 0
    """Steps: those of multiples stay for good; 0: none."""
    best: str | None = None
    """A metric whose best checkpoint stays; the loss is best when low, others when high."""


@dataclass(frozen=True)
class Saved:
    """What is known of a whole checkpoint."""

    name: str
    step: int
    metrics: dict[str, float]
    """Of an evaluation at exactly this step; empty when there was none."""


def removable(saved: Sequence[Saved], keep: Retention) -> list[str]:
    """The names of those that may go, the oldest first; never the newest. `saved` may come in any order."""
    by_step = sorted(saved, key=lambda each: each.step)
    stay = {each.name for each in by_step[-max(keep.last, 1) :]}
    stay |= {each.name for each in by_step if keep.every and each.step % keep.every == 0}
    if keep.best is not None:
        judged = [each for each in by_step if not math.isnan(each.metrics.get(keep.best, math.nan))]
        if judged:
            sign = 1 if keep.best == "loss" else -1
            stay.add(min(judged, key=lambda each: (sign * each.metrics[keep.best or ""], -each.step)).name)
    return [each.name for each in by_step if each.name not in stay]
