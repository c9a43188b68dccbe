"""How far a run has come: what changes with its steps, besides the model and the optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dure.data.ledger import SampleLedger


@dataclass
class Progress:
    """The part of a run's state that is no tensor."""

    steps_done: int = 0
    loss: float = float("nan")
    metrics: dict[str, float] = field(default_factory=dict)
    evaluated_after: int = -1
    """`steps_done` at the last evaluation."""
    ledger: SampleLedger = field(default_factory=SampleLedger)
    """The samples that were used by then."""

    @property
    def evaluated(self) -> bool:
        """Whether `metrics` are those of exactly this step."""
        return self.evaluated_after == self.steps_done

    def to_facts(self) -> dict[str, Any]:
        """As a state holds it, besides the step."""
        return {
            "loss": self.loss,
            "metrics": self.metrics,
            "judged_after": self.evaluated_after,
            "ledger": self.ledger.to_plain(),
        }

    def go_on_from(self, facts: Mapping[str, Any]) -> None:
        """Take over the progress of a state."""
        loss = facts.get("loss")
        self.steps_done, self.loss = int(facts["step"]), math.nan if loss is None else float(loss)
        self.metrics = dict(facts.get("metrics", {}))
        self.evaluated_after = int(facts.get("judged_after", -1))
        self.ledger.go_on_from(facts.get("ledger"))
