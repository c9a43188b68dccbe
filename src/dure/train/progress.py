"""How far a run has come: what changes with its steps, besides the model and the optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dure.base.errors import JobError
from dure.config.sections import Eval
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
    best: float | None = None
    """Of the metric that decides whether the run ends early."""
    not_better: int = 0
    """Evaluations since then."""
    stopped: bool = False
    """The run ended early: it does not go on."""

    def ends_early(self, settings: Eval) -> bool:
        """Note the last evaluation's metrics; returns whether the run is to end."""
        if settings.stop_on is None:
            return False
        if settings.stop_on not in self.metrics:
            raise JobError(
                f"eval.stop_on is {settings.stop_on!r}, which is no metric; there are {', '.join(self.metrics)}"
            )
        value = self.metrics[settings.stop_on]
        return self.judge(value, after=settings.stop_after, less_is_better=settings.stop_mode == "min")

    def judge(self, value: float, *, after: int, less_is_better: bool) -> bool:
        """Note an evaluation's metric, the same on all ranks; returns whether the run is to end: after so many in a row
        that were not better than the best."""
        sign = 1.0 if less_is_better else -1.0
        better = self.best is None or sign * value < sign * self.best
        if better and not math.isnan(value):
            self.best, self.not_better = value, 0
        else:
            self.not_better += 1
        self.stopped = self.not_better >= after
        return self.stopped

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
            "early_stop": [self.best, self.not_better, self.stopped],
        }

    def go_on_from(self, facts: Mapping[str, Any]) -> None:
        """Take over the progress of a state."""
        loss = facts.get("loss")
        self.steps_done, self.loss = int(facts["step"]), math.nan if loss is None else float(loss)
        self.metrics = dict(facts.get("metrics", {}))
        self.evaluated_after = int(facts.get("judged_after", -1))
        self.ledger.go_on_from(facts.get("ledger"))
        self.best, self.not_better, self.stopped = facts.get("early_stop", (None, 0, False))
