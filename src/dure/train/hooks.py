"""A job's own functions, called at some moments of a run, in step on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dure.base.errors import JobError
from dure.comm.raise_on_all import raise_on_all
from dure.team import Team

MOMENTS = ("on_start", "on_step", "on_eval", "on_save", "on_end")


@dataclass(frozen=True)
class Moment:
    """What a hook is told. All of it is the same on all ranks, but for `team.rank`."""

    team: Team
    model: torch.nn.Module
    """The module itself, not the replica."""
    optimizer: torch.optim.Optimizer
    steps: int
    """Steps that are done."""
    loss: float
    """The last step's."""
    metrics: Mapping[str, float]
    """The last evaluation's."""


class Hooks(Protocol):
    """What a job's `hooks` may return: any of these methods will do.

    They are called on all ranks, in step, in the training thread: whatever one of them raises on any rank is raised on
    all. What changes the model must do so on all ranks alike.

    Example:
        ```python
        class Shout:
            def on_eval(self, at):
                at.team.print(f"after {at.steps} steps: {at.metrics}")

        def hooks():
            return Shout()
        ```
    """

    def on_start(self, at: Moment) -> None:
        """Before the first step of a session; `at.steps` is more than 0 when the run was resumed."""

    def on_step(self, at: Moment) -> None:
        """After each step."""

    def on_eval(self, at: Moment) -> None:
        """After each evaluation."""

    def on_save(self, at: Moment) -> None:
        """When a checkpoint of this step was begun."""

    def on_end(self, at: Moment) -> None:
        """After the last step, before the last proof."""


class HookCalls:
    """Calls those methods that there are."""

    def __init__(self, hooks: object, team: Team) -> None:
        self._team = team
        self._calls = {name: call for name in MOMENTS if callable(call := getattr(hooks, name, None))}
        if hooks is not None and not self._calls:
            raise JobError(
                f"hooks: a {type(hooks).__name__} has none of {', '.join(MOMENTS)}; return an object with some of them"
            )
        told = raise_on_all(team.group, "comparing hooks", lambda: ",".join(self._calls))
        if len(set(told)) > 1:
            raise JobError("hooks: ranks have different methods; all ranks must be given the same")

    def __contains__(self, name: str) -> bool:
        return name in self._calls

    def __call__(self, name: str, moment: Moment) -> None:
        """A collective call, where the hook is there."""
        call: Any = self._calls.get(name)
        if call is not None:
            raise_on_all(self._team.group, f"the hook {name}", lambda: str(call(moment) or "")[:0])
