"""How the ranks of a node are launched and watched: one value, from the command to the agent."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dure.base.run_folder import RunFolder
from dure.base.say import say
from dure.launch.restart_policy import Restart, UnsavedScript

if TYPE_CHECKING:
    from dure.launch.nodes.join import Joined
    from dure.launch.nodes.messages import Team


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """How a team is launched; what its ranks do is said beside it (`Call`, `Script` or `Command`)."""

    ranks: int
    """Ranks on this node."""
    folder: RunFolder
    """Where the run keeps its files; the output of ranks is in `folder.log(rank)`."""
    port: int = 0
    """Of the team's store on this host; 0: a free one. With `joined` the leader has it."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Variables that ranks find, beside what this process has, before they import anything; None: taken away."""
    tee: bool = False
    """Whether the output of ranks is on the console too."""
    hang_seconds: float = math.inf
    """When no rank's heartbeat has moved for so long, all stacks are collected and the team has failed."""
    grace_seconds: float = 1.0
    """How long ranks that are told to end may take before they are killed."""
    max_restarts: int = 0
    """How often a team that its machine failed is started again without getting to a further step."""
    script: UnsavedScript | None = None
    """What holds for a script until it saves; only then it can be asked to stop at a step. None: not a script."""
    min_ranks: int | None = None
    """After that, the team goes on with one rank less, and so on, down to so many; None: it does not."""
    stop_seconds: float = math.inf
    """How long ranks that have been asked to stop may take before they are ended."""
    stop_setting: str = "team.stop_seconds"
    """What the user knows that as."""
    ask_to_stop: Callable[[str], None] | None = None
    """Asks ranks to stop at a step and save; is given the name of the first Ctrl-C, SIGTERM, SIGHUP or SIGUSR1. Where
    it raises OSError, ranks are told by SIGUSR1. None: they cannot, and the signal is passed on to them."""
    joined: Joined | None = None
    """With it, these are one node's ranks of a team of several nodes, and the leader decides about restarts."""
    to_json: Callable[[object], Any] = lambda value: value
    """Makes the value of a rank fit for the way to the leader."""
    on_tick: Callable[[], None] = lambda: None
    """Called about ten times a second."""
    on_restart: Callable[[Restart], None] = lambda restart: None
    """Told of each restart, unless the leader decides about them."""
    on_team: Callable[[Team], None] = lambda team: None
    """Told of each team that several nodes form."""
    on_said: Callable[[str], None] = say
    """Told what a rank has to say at once, when its log or its events cannot be written."""

    @property
    def stops_at_a_step(self) -> bool:
        """Whether ranks can be asked to stop and save, by now."""
        return self.ask_to_stop is not None and (self.script is None or self.script.saves())
