"""Permission to run, which whoever started this agent renews: over, when they may have started the run elsewhere."""

from __future__ import annotations

import queue
from collections.abc import Iterator

from dure.base.errors import Resumable


class LeaseOver(Resumable):
    """This agent was cut off from its supervisor, or told to end at once. Nothing was asked of other nodes."""

    exit_code = 76
    """Between an agent and its supervisor only, which starts the run again: never the code of a user's command."""


class Lease:
    """What the thread that listens to the supervisor has heard; the agent and the leader look at it."""

    def __init__(self) -> None:
        self._why = ""
        self._lost: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()

    def end(self, why: str) -> None:
        """From now on the agent may not run; the first reason counts."""
        self._why = self._why or why

    def note_lost(self, node: int, why: str) -> None:
        """The engine knows that a node is lost."""
        self._lost.put((node, why))

    def lost_nodes(self) -> Iterator[tuple[int, str]]:
        """The nodes that were noted as lost since the last call, and why."""
        while not self._lost.empty():
            yield self._lost.get()

    def check(self) -> None:
        """Raise LeaseOver once it has ended."""
        if self._why:
            raise LeaseOver(f"{self._why}; the ranks of this node are ended")
