"""Who decides about a team: this node alone, or the leader of several."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from dure.base.errors import Failure
from dure.launch.failure import unsaved
from dure.launch.nodes.member import Member
from dure.launch.nodes.messages import Again, Done, End, Failed, Team
from dure.launch.rank_store import store_listener
from dure.launch.restart_policy import Restart, RestartPolicy


class AgentLink(Protocol):
    """What the agent asks of whoever decides."""

    def form(self) -> tuple[Team, socket.socket | None]:
        """Wait for the next team. With it, the port that this node shall serve its store at, where that is its part."""

    def decision(self, step: int) -> Again | End | None:
        """What is to be done with the ranks; None while they go on. `step` is the furthest they were seen in."""

    def failed(self, failure: Failure, step: int) -> None:
        """A rank of this node has failed: `decision` gives the answer."""

    def done(self, values: Sequence[object]) -> None:
        """All ranks of this node have ended well: `decision` gives the answer."""


class Alone:
    """One node: nobody to ask."""

    def __init__(
        self,
        listener: socket.socket,
        restart_policy: RestartPolicy,
        on_restart: Callable[[Restart], None],
        stopping: Callable[[], bool],
    ) -> None:
        """`stopping`: whether the ranks have been asked to stop; then they are not started again."""
        self._address = listener.getsockname()[0]
        self._listener: socket.socket | None = listener
        self._restart_policy = restart_policy
        self._on_restart = on_restart
        self._stopping = stopping
        self._answer: Again | End | None = None

    def form(self) -> tuple[Team, socket.socket | None]:
        """A team of this node."""
        self._answer = None
        listener, self._listener = self._listener or store_listener(self._address), None
        ranks = self._restart_policy.ranks
        team = Team(
            number=0,
            node=0,
            nodes=1,
            first_rank=0,
            local_ranks=ranks,
            ranks=ranks,
            leader=self._address,
            store_port=listener.getsockname()[1],
            restarts=self._restart_policy.restarts,
        )
        return team, listener

    def decision(self, step: int) -> Again | End | None:
        """What came of the last failure, or of the end."""
        return self._answer

    def failed(self, failure: Failure, step: int) -> None:
        """Start again, or raise what the run ends with."""
        if self._stopping():
            raise unsaved(failure)
        self._on_restart(self._restart_policy.after(failure, step))
        self._answer = Again(0, failure.message)

    def done(self, values: Sequence[object]) -> None:
        """Nobody else has to be."""
        self._answer = End()


class LeaderLink:
    """One of several nodes: what happens is told to the leader, who decides."""

    def __init__(
        self,
        member: Member,
        check: Callable[[], None],
        on_team: Callable[[Team], None],
        to_json: Callable[[object], Any],
    ) -> None:
        """`check` is called in waits; `to_json` makes what a rank returned fit for the way to the leader."""
        self._member = member
        self._check = check
        self._on_team = on_team
        self._to_json = to_json
        self._team = 0

    def form(self) -> tuple[Team, socket.socket | None]:
        """Wait for the leader's word."""
        team, listener = self._member.next_team(self._check), None
        if team.store_port == 0:
            listener = store_listener(team.leader)
            port = listener.getsockname()[1]
            self._member.store_is_up(team.number, port)
            team = replace(team, store_port=port)
        self._team = team.number
        self._on_team(team)
        return team, listener

    def decision(self, step: int) -> Again | End | None:
        """The leader's word, if there is one."""
        self._member.has_got_to(step)
        return self._member.order(self._team)

    def failed(self, failure: Failure, step: int) -> None:
        """Tell the leader."""
        self._member.has_got_to(step)
        self._member.tell(Failed(self._team, failure))

    def done(self, values: Sequence[object]) -> None:
        """Tell the leader."""
        self._member.tell(Done(self._team, [self._to_json(value) for value in values]))
