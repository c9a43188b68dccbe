"""How often replicas are compared while a run goes on: every so many steps, or as often as costs little.

`auto` measures. With each proof every rank tells what hashing its replica took, in CPU-seconds, what the exchange of
the proof before took, and how long its steps are; all ranks hear the same numbers, so all of them prove at the same
steps. Costs are the smallest of this session: whatever else the machine does only adds to them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

SHARE = 0.005
"""Of a step's time, on average."""
MOST_STEPS = 1000
"""Between two proofs, whatever they cost."""


@dataclass(frozen=True)
class ProofCost:
    """What one rank has measured, in seconds."""

    hashing: float
    """CPU-seconds, of its whole replica."""
    exchange: float
    """Of the fingerprints, with the wait for others; 0: not known yet."""
    step: float
    """Of a step, on average since the proof before."""

    def as_text(self) -> str:
        """For the other ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> ProofCost:
        """The inverse."""
        return cls(**json.loads(text))


def steps_between(everyones: Sequence[ProofCost]) -> int:
    """Steps from one proof to the next, so that the slowest hash and the exchange cost SHARE of the steps between.

    Who comes last to the exchange waits least: the smallest time is the exchange's own.
    """
    cost = max(one.hashing for one in everyones) + min(one.exchange for one in everyones)
    step = min(one.step for one in everyones)
    if step <= 0:
        return 1
    return min(max(math.ceil(cost / (SHARE * step)), 1), MOST_STEPS)


class ProofCadence:
    """Says after which steps replicas are compared; the same on all ranks."""

    def __init__(self, every: int | Literal["auto"], steps_done: int) -> None:
        """0: never."""
        self._every = every
        self._proved_at = steps_done
        self._next = steps_done + 1
        self._seconds = 0.0
        self._hashing = self._exchange = math.inf

    @property
    def is_measured(self) -> bool:
        """Whether proofs are to tell what they cost."""
        return self._every == "auto"

    def is_due(self, steps_done: int) -> bool:
        """After so many steps."""
        if self._every == "auto":
            return steps_done >= self._next
        return self._every > 0 and steps_done % self._every == 0

    def step_took(self, seconds: float) -> None:
        """A step is done, without what was saved, evaluated or proved after it."""
        self._seconds += seconds

    def cost(self, hashing: float, steps_done: int) -> ProofCost:
        """What this rank tells with a proof that is under way."""
        self._hashing = min(self._hashing, hashing)
        steps = max(steps_done - self._proved_at, 1)
        known = self._exchange if math.isfinite(self._exchange) else 0.0
        return ProofCost(self._hashing, known, self._seconds / steps)

    def proved(self, everyones: Sequence[ProofCost], exchange: float, steps_done: int) -> None:
        """All ranks told what it costs; `exchange` is what that took here."""
        self._exchange = min(self._exchange, exchange)
        self._proved_at, self._seconds = steps_done, 0.0
        self._next = steps_done + steps_between(everyones)
