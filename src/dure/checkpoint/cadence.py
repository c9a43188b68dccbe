"""How often a state is kept in memory. Pure: no clocks, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

SHARE_OF_TIME = 0.01
"""Of a step's time, that keeping states may take."""
MOST_STEPS = 1_000
"""That a crash may cost, however dear it is to keep a state."""
_FIRST_TOUCHES = 2
"""The first state in each slot also pays for fresh memory, once; that says nothing of the next ones."""


@dataclass(frozen=True)
class Costs:
    """What all ranks agree on: the slowest one's cost of keeping a state, and the fastest one's step."""

    state_seconds: float
    step_seconds: float


@dataclass(frozen=True)
class Cadence:
    """When the next state is kept: the same on every rank, as all know the same costs."""

    every: int | None
    """Steps between two; None: as many as stay under `SHARE_OF_TIME`."""
    due: int
    """The state before this step is to be kept."""
    steps: int = 1
    """Between this state and the one before."""
    kept: int = 0

    @classmethod
    def begin(cls, every: int | None, step: int) -> Cadence:
        """For a run that goes on with `step`."""
        return cls(every, step + (every or 1), every or 1)

    @property
    def asks(self) -> bool:
        """Whether ranks are to agree on the costs of the state that is due; not always, it takes an exchange."""
        return self.every is None and self.kept >= _FIRST_TOUCHES and (self.kept < 8 or self.kept % 16 == 0)

    def after(self, step: int, costs: Costs | None) -> Cadence:
        """What follows when a state was kept before `step`, at these costs, if ranks agreed on them."""
        steps = self.every or self.steps
        if self.every is None and costs is not None:
            fitting = costs.state_seconds / (SHARE_OF_TIME * max(costs.step_seconds, 1e-6))
            steps = max(1, math.ceil(min(fitting, MOST_STEPS)))
        return Cadence(self.every, step + steps, steps, self.kept + 1)
