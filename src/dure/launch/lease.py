"""Permission to run, which whoever started this agent renews: over, when they may have started the run elsewhere."""

from __future__ import annotations

from dure.base.errors import Resumable


class LeaseOver(Resumable):
    """This agent was cut off from its supervisor, or told to end at once. Nothing was asked of other nodes."""

    exit_code = 76
    """Between an agent and its supervisor only, which starts the run again: never the code of a user's command."""


class Lease:
    """Ended by the thread that listens to the supervisor, noticed by the agent at its next look."""

    def __init__(self) -> None:
        self._why = ""

    def end(self, why: str) -> None:
        """From now on the agent may not run; the first reason counts."""
        self._why = self._why or why

    def check(self) -> None:
        """Raise LeaseOver once it has ended."""
        if self._why:
            raise LeaseOver(f"{self._why}; the ranks of this node are ended")
