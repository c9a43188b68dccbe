"""What the leader decides: who is in the team, when it starts again, when the run is over.

Pure: it is told what happens and when, and answers with messages to nodes. No sockets, no threads, no clock.

It survives any sequence of messages: those that make no sense are ignored, or cost the node that sent them its place.

    GATHERING   nodes come and get ready; enough of them, and a team is formed
    FORMING     the leader's node opens the ranks' store
    RUNNING     until all nodes are done, one is lost, one comes, or a rank fails
    ENDED       everybody has been told
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from dure.base.errors import Failure, RankFailed, Resumable
from dure.launch.nodes import messages
from dure.launch.nodes.messages import (
    Again,
    Alive,
    Done,
    End,
    Failed,
    Hello,
    Message,
    Ready,
    Refused,
    StoreUp,
    Team,
    Welcome,
)
from dure.launch.restart_policy import Restart, RestartPolicy, UnsavedScript

LEADER = 0
_BETTER_CAUSE_SECONDS = 4.0
_LAST_CALL_SECONDS = 5.0
_MOST_FAILURES = 1000

Outgoing = list[tuple[int, Message]]
"""(node, message to it)."""


@dataclass(frozen=True)
class Terms:
    """How many nodes a run takes, and how long they are waited for."""

    nodes: int
    fewest: int
    facts: dict[str, str]
    run: str
    join_seconds: float
    max_restarts: int
    resumable: bool = True
    """Whether the run goes on from what it has saved when it is started again."""
    script: UnsavedScript | None = None
    """What holds for a script until it saves."""

    @property
    def goes_on(self) -> bool:
        """Whether the run would go on, as far as is known by now."""
        return self.resumable or (self.script is not None and self.script.saves())


@dataclass
class _Member:
    hello: Hello
    step: int = -1
    values: list[Any] | None = None

    @property
    def name(self) -> str:
        return f"node {self.hello.node} ({self.hello.host}, {self.hello.address})"


class _Phase(Enum):
    GATHERING = 1
    FORMING = 2
    RUNNING = 3
    ENDED = 4


@dataclass
class Membership:
    """Membership state machine; runs on the leader. `say` tells the user, `on_restart` hears of each restart."""

    terms: Terms
    now: float
    say: Callable[[str], None]
    on_restart: Callable[[Restart], None]
    stopping: Callable[[], bool] = lambda: False
    """Whether the ranks have been asked to stop: then no team is started again, and no node is taken in."""
    members: dict[int, _Member] = field(default_factory=dict)
    values: list[Any] = field(default_factory=list)
    """What all ranks returned, in rank order, when the run is over and all went well."""

    def __post_init__(self) -> None:
        self._phase = _Phase.GATHERING
        self._gathering_since = self.now
        self._enough_since: float | None = None
        self._in_team: list[int] = []
        self._unready: set[int] = set()
        """Members that have not said that they are ready; kept, so that N that say so cost N looks, not N squared."""
        self._team = 0
        self._restart_policy = RestartPolicy(self.terms.max_restarts, ranks=0, script=self.terms.script)
        self._failures: list[tuple[Failure, float]] = []
        self._excluded: dict[int, str] = {}
        """Nodes that compute wrongly, and their hosts."""
        self._furthest = -1

    @property
    def ended(self) -> bool:
        """Whether the run is over, and all nodes have been told."""
        return self._phase is _Phase.ENDED

    def hello(self, node: Hello, now: float) -> Outgoing:
        """A node has come. It is refused, or in the team that is formed next."""
        refused = self._refusal(node)
        if refused is not None:
            return [(node.node, refused)]
        self.members[node.node] = _Member(node)
        self._unready.add(node.node)
        outgoing: Outgoing = [(node.node, Welcome(self.terms.run))]
        if self._phase in (_Phase.FORMING, _Phase.RUNNING):
            name = self.members[node.node].name
            self.say(f"{name} joins")
            outgoing += self._again(f"{name} joins", now)
        return outgoing

    def lost(self, node: int, why: str, now: float) -> Outgoing:
        """A node is gone, or has not been heard of for too long."""
        member = self.members.pop(node, None)
        self._unready.discard(node)
        if member is None or self._phase is _Phase.ENDED:
            return []
        self.say(f"{member.name} is lost: {why}")
        if self._phase is _Phase.GATHERING and self._team == 0:
            return []
        cause = Failure(f"{member.name} is lost: {why}", host=member.hello.host, may_pass=True)
        if len(self.members) < self.terms.fewest or LEADER not in self.members:
            return self._end_resumable(
                f"{member.name} is lost ({why}), and at least {self._words_for_fewest()} needed"
            )
        if self.stopping():
            return self._end_resumable(f"{member.name} is lost ({why}) while the run stops")
        if self._phase is _Phase.GATHERING:
            return []
        return self._restart_after(cause, now, network=True)

    def heard(self, node: int, message: Message, now: float) -> Outgoing:
        """A node has said something."""
        member = self.members.get(node)
        if member is None or self._phase is _Phase.ENDED:
            return []
        match message:
            case Alive(step):
                member.step = step
                self._furthest = max(self._furthest, step)
            case Ready():
                self._unready.discard(node)
                return self._form(now)
            case StoreUp(team, port) if node == LEADER and team == self._team:
                return self._start_others(port)
            case Failed(team, failure) if team == self._team:
                self._failures[_MOST_FAILURES:] = []  # more would explain nothing
                self._failures.append((failure, now))
                return self._judge(now)
            case Done(team, values) if team == self._team:
                return self._done(node, member, values, now)
        return []

    def tick(self, now: float) -> Outgoing:
        """Time has passed."""
        if self._phase is _Phase.GATHERING:
            return self._form(now) or self._give_up_waiting(now)
        return self._judge(now)

    def missing(self) -> str:
        """For whom the run waits, in words; "" when for nobody."""
        enough = self._team > 0 and len(self.members) >= self.terms.fewest
        if self._phase is not _Phase.GATHERING or enough:
            return ""
        absent = [str(node) for node in range(self.terms.nodes) if node not in self.members]
        return (
            f"node{'s' if len(absent) > 1 else ''} {', '.join(absent)} of {self.terms.nodes}"
            if absent
            else ""
        )

    def _refusal(self, node: Hello) -> Refused | None:
        if node.version != messages.VERSION:
            return Refused(
                f"it speaks version {node.version} of the agents' language, the leader {messages.VERSION}"
            )
        if node.node >= self.terms.nodes:
            return Refused(
                f"--node-rank {node.node} is not one of {self.terms.nodes} nodes; use 0 to {self.terms.nodes - 1}"
            )
        is_excluded = node.host in self._excluded.values()
        if is_excluded or self._phase is _Phase.ENDED or (self._team and self.stopping()):
            excluded = f"{node.host} was excluded from this run: a rank of it computed wrongly"
            return Refused(excluded if is_excluded else "the run is over, or about to be")
        for name, ours in self.terms.facts.items():
            theirs = node.facts.get(name)
            if theirs != ours:
                return Refused(f"its {name} is {theirs}, the leader's is {ours}; make them the same")
        if node.node in self.members:
            taken = self.members[node.node]
            # Perhaps by itself: a node that was cut off and is started again, before the leader has missed it.
            return Refused(
                f"--node-rank {node.node} is taken by {taken.hello.host}; give each node its own",
                may_pass=True,
            )
        return None

    def _form(self, now: float) -> Outgoing:
        """Form a team, if enough nodes are here and all of them are ready."""
        if self._phase is not _Phase.GATHERING or LEADER not in self.members:
            return []
        if len(self.members) < self.terms.fewest or self._unready:
            return []
        if self._enough_since is None:
            self._enough_since = now
        # Who comes together starts together; but those who are left of a team know that the others are gone.
        first = self._team == 0 and len(self.members) < self.terms.nodes
        if first and now - self._enough_since < _LAST_CALL_SECONDS:
            return []
        self._team += 1
        self._in_team = sorted(self.members)
        self._phase = _Phase.FORMING
        self._failures.clear()
        for member in self.members.values():
            member.values = None
        self._unready = set(self.members)
        return [(LEADER, self._parts(store_port=0, where=self._where())[0])]

    def _start_others(self, store_port: int) -> Outgoing:
        """The ranks of the leader's node can be met: all other nodes start theirs."""
        if self._phase is not _Phase.FORMING:
            return []
        self._phase = _Phase.RUNNING
        return list(zip(self._in_team[1:], self._parts(store_port)[1:], strict=True))

    def _parts(self, store_port: int, where: str = "") -> list[Team]:
        """Each node's part of the team, in the order of the nodes; the first is the leader's."""
        sizes = [self.members[node].hello.ranks for node in self._in_team]
        *firsts, ranks = itertools.accumulate(sizes, initial=0)
        return [
            Team(
                number=self._team,
                node=at,
                nodes=len(sizes),
                first_rank=first,
                local_ranks=size,
                ranks=ranks,
                leader=self.members[LEADER].hello.address,
                store_port=store_port,
                restarts=self._restart_policy.restarts,
                where=where,
            )
            for at, (size, first) in enumerate(zip(sizes, firsts, strict=True))
        ]

    def _where(self) -> str:
        """The map of ranks and hosts, in one line."""
        first, places = 0, []
        for hello in (self.members[node].hello for node in self._in_team):
            which = f"ranks {first}-{first + hello.ranks - 1}" if hello.ranks > 1 else f"rank {first}"
            places.append(f"{which} on {hello.host} ({hello.address})")
            first += hello.ranks
        return ", ".join(places)

    def _judge(self, now: float) -> Outgoing:
        """Answer failures, once the one that explains the others has had time to come."""
        if not self._failures or self._phase not in (_Phase.FORMING, _Phase.RUNNING):
            return []
        cause = min(self._failures, key=lambda told: (told[0].aftermath, told[1]))[0]
        if cause.excludes:
            return self._exclude(cause, now)
        waited = now - self._failures[0][1]
        if cause.aftermath and waited < _BETTER_CAUSE_SECONDS:
            return []
        return self._restart_after(cause, now, network=cause.aftermath)

    def _exclude(self, cause: Failure, now: float) -> Outgoing:
        """Go on without the node of a rank that computes wrongly, or end the run."""
        sizes = [self.members[node].hello.ranks if node in self.members else 0 for node in self._in_team]
        ends = itertools.accumulate(sizes)
        node = next((n for n, end in zip(self._in_team, ends, strict=True) if cause.rank < end), LEADER)
        member = self.members.get(node)
        too_few = len(self.members) - 1 < self.terms.fewest
        if member is None or node == LEADER or too_few or not self.terms.max_restarts or self.stopping():
            return self._end(End(cause))
        del self.members[node]
        self._excluded[node] = member.hello.host
        self.say(f"{member.name} is excluded: {cause.message}")
        self.on_restart(self._restart_policy.without(cause, self._furthest))
        return [(node, End(cause)), *self._again(cause.message, now)]

    def _restart_after(self, failure: Failure, now: float, *, network: bool) -> Outgoing:
        """Start again, or end the run. `network`: nodes lost each other, and no rank did anything wrong."""
        if failure.may_pass and self.stopping():
            return self._end_resumable(
                f"{failure.message} The run was asked to stop, so it is not started again"
            )
        try:
            restart = self._restart_policy.after(failure, self._furthest)
        except RankFailed as given_up:
            if network and self.terms.max_restarts:
                return self._end_resumable(str(given_up))
            return self._end(End(given_up.failure))
        self.on_restart(restart)
        return self._again(failure.message, now)

    def _again(self, cause: str, now: float) -> Outgoing:
        self._phase = _Phase.GATHERING
        self._gathering_since, self._enough_since = now, None
        self._failures.clear()
        return [(node, Again(self._team, cause)) for node in self._in_team if node in self.members]

    def _done(self, node: int, member: _Member, values: list[Any], now: float) -> Outgoing:
        if len(values) != member.hello.ranks:
            return self.lost(node, f"it told {len(values)} values of {member.hello.ranks} ranks", now)
        member.values = values
        if self._phase is not _Phase.RUNNING:
            return []
        members = [self.members[node] for node in self._in_team]
        if any(member.values is None for member in members):
            return []
        self.values = [value for member in members for value in member.values or []]
        return self._end(End())

    def _give_up_waiting(self, now: float) -> Outgoing:
        waited = now - self._gathering_since
        if waited < self.terms.join_seconds or len(self.members) >= self.terms.fewest:
            return []
        missing = self.missing()
        if self._team:
            return self._end_resumable(f"waited {waited:.0f} s for {missing}")
        return self._end(
            End(
                Failure(
                    f"timed out after {waited:.0f} s waiting for {missing}; "
                    "start the same command there with its --node-rank"
                )
            )
        )

    def _end_resumable(self, why: str) -> Outgoing:
        if not self.terms.goes_on:
            return self._end(End(Failure(f"{why}; all ranks are ended")))
        how = f" with --run-dir {self.terms.run}" if self.terms.resumable else ""
        words = f"{why}; resumable: the same commands{how} go on from the newest checkpoint"
        return self._end(End(Failure(words, exit_code=Resumable.exit_code)))

    def _end(self, end: End) -> Outgoing:
        self._phase = _Phase.ENDED
        return [(node, end) for node in self.members]

    def _words_for_fewest(self) -> str:
        return "1 node is" if self.terms.fewest == 1 else f"{self.terms.fewest} nodes are"
