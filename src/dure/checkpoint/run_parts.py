"""What a CheckpointManager is given: the run's progress, what is captured, who trains together, whom to tell."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dure.checkpoint.script_state import Extra
from dure.checkpoint.state import Schedule, Sharing
from dure.comm.group import Group
from dure.comm.topology import Topology
from dure.observe import events
from dure.observe.heartbeat import Heartbeat


class Progress(Protocol):
    """How far the run has come. The manager changes it when the run goes on from an earlier state."""

    steps_done: int
    metrics: dict[str, float]

    @property
    def evaluated(self) -> bool:
        """Whether `metrics` are of an evaluation after exactly `steps_done` steps."""

    def to_facts(self) -> dict[str, Any]:
        """All of it but the step, as plain JSON."""

    def go_on_from(self, facts: Mapping[str, Any]) -> None:
        """Take over what `to_facts` gave, and `facts["step"]`."""


@dataclass(frozen=True)
class Replica:
    """What is captured and restored."""

    module: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Schedule | None
    sharing: Callable[[], Sharing | None]
    """Which parts of a sharded optimizer this rank holds; None when every rank has it whole."""
    verify: Callable[[int], object]
    """Raises unless all ranks hold the same bits after this step. A collective call."""
    extra: Extra | None = None
    """What a script adds to its states."""


@dataclass(frozen=True)
class Ranks:
    """Who trains together."""

    topology: Topology
    group: Group
    """All ranks, for small exchanges on the training thread."""
    device: torch.device
    sync: bool = True
    """Whether they train one model. Replicas that differ are no state: then nothing is kept or saved."""


@dataclass(frozen=True)
class RunInfo:
    """What a run's states say of it."""

    steps: int | None
    """Of the whole run; None: nobody knows."""
    steps_of_epoch: int | None
    recipe: dict[str, Any]
    """All that the bits depend on; a state of another recipe is refused, and what differs is named."""
    facts: dict[str, Any]
    """Plain JSON that is only for people and goes into every checkpoint."""
    takes_any_recipe: bool = False
    """Whether a state of another recipe is taken all the same, with a note."""

    @property
    def of_steps(self) -> str:
        """How far the run is to come, in words."""
        return "" if self.steps is None else f" of {self.steps}"


@dataclass(frozen=True)
class Reporting:
    """Whom this rank tells what."""

    recorder: events.Recorder
    heartbeat: Heartbeat
    note: Callable[[str], None]
    """Tells the user something."""
    saving: Callable[[int], None] = lambda steps_done: None
    """Told before the state after so many steps is saved to storage."""
