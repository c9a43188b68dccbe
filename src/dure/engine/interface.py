"""What an engine is: whose machines the agents of a run are started on. Agents and leader decide about ranks.

There are two kinds. With `Machines`, the command stays: a `Supervisor` starts an agent on each node, watches them, and
starts the run again when it must (ssh, Ray). A `Scheduler` is handed the job, and starts it later, without us (Slurm,
Kubernetes, Ray's job queue). A node that somebody starts by hand, or a scheduler's own step, needs neither:
`node_start.start_node` is that node's part.

A new engine is one file or folder with one of the two, its line in `engine/engines.py`, and its tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dure.base.team_key import TeamKey

if TYPE_CHECKING:
    from dure.config import LoadedJob
    from dure.engine.node_start import NodeStart

LOST = 255
"""The exit code of an agent whose node was lost, or cannot be reached any more. ssh's own."""

Check = Callable[[], None]
"""Called in waits; raises what the command ends with."""


def _no_check() -> None:
    pass


class RunningAgent(Protocol):
    """An agent that was started on a node. It ends by itself when nothing is heard of us for `lost_seconds`."""

    def exit_code(self) -> int | None:
        """None while it runs; LOST when its node was lost."""

    def lost_because(self) -> str:
        """Why the engine is sure that its node is lost, so that the leader need not wait; "" when it is not sure."""

    def tell(self, name: str, **fields: str | int) -> None:
        """Send it a message of `engine.attached`; an agent that is gone is no error."""

    def let_go(self) -> None:
        """Close the way to it, which asks it to end."""

    def kill(self) -> None:
        """End our side at once."""

    def wait(self, deadline: float, check: Check = _no_check) -> int | None:
        """Its exit code, when all that it printed was passed on; None if it has not ended by `deadline`."""


class Machines(Protocol):
    """The nodes of a run, by names that stay; who is behind a name may change."""

    @property
    def names(self) -> tuple[str, ...]:
        """All nodes that may take part; the first is the first leader."""

    def trouble(self, names: Sequence[str], seconds: float) -> dict[str, str]:
        """Why each node that cannot be used now cannot be; those that are not named here are there."""

    def way_out(self, name: str) -> str:
        """What a user can do about a node that cannot be used."""

    def address(self, name: str) -> str:
        """Where other nodes reach it."""

    def start(
        self, name: str, start: NodeStart, key: TeamKey, *, out: Callable[[str], None] | None
    ) -> RunningAgent:
        """Start an agent there. What it prints goes to standard error, with the node's name before it; `out` takes what
        it prints on standard output. The key must not be seen in arguments, variables, logs or events."""

    def close(self) -> None:
        """Give everything back. All agents have ended, or cannot be reached."""


@dataclass(frozen=True)
class Asked:
    """What a scheduler is asked for, as `dure submit` has it."""

    loaded: LoadedJob
    job: Path
    """The job's file."""
    settings: tuple[str, ...] = ()
    """Those of `--set`."""
    ranks: int | None = None
    nodes: str | None = None
    run_dir: Path | None = None


class Answer(Protocol):
    """What came of a request."""

    def as_json(self) -> dict[str, object]:
        """As plain values."""

    def in_words(self) -> str:
        """For a person."""


class Scheduler(Protocol):
    """A queue that a job is handed to. `target` is a run's folder, or the queue's own name of a job."""

    def draft(self, asked: Asked) -> str:
        """What would be handed over, as text; needs none of the queue's own commands."""

    def submit(self, asked: Asked) -> Answer:
        """Hand it over."""

    def status(self, target: str | None) -> Answer:
        """How a job is; with None, all of this user's that dure submitted."""

    def cancel(self, target: str, *, now: bool) -> Answer:
        """End a job: so that it saves, or at once."""

    def logs(self, target: str, *, follow: bool) -> Iterator[str]:
        """What its nodes have printed, line by line; with `follow`, until it ends."""
