"""What N nodes cost: milliseconds, messages, bytes and files as functions of N, by calling the real code.

Membership is pure, so 1,024 nodes are simply simulated; a real leader is driven over loopback by thin agents (sockets
that say what an agent says, without ranks); nodes that train are namespaces of this machine.
"""

from __future__ import annotations

import contextlib
import selectors
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from dure.base.errors import DureError, Failure, UsageError
from dure.base.run_folder import RunFolder
from dure.base.team_key import TeamKey
from dure.launch import run_team
from dure.launch.nodes import messages
from dure.launch.nodes.connection import AgentConnection, close_all
from dure.launch.nodes.leader import Leader, listen_for_nodes
from dure.launch.nodes.member import reach_leader
from dure.launch.nodes.membership import LEADER, Membership, Outgoing, Terms
from dure.launch.nodes.messages import Alive, Failed, Hello, Message, Ready, StoreUp, Team
from dure.tools.bench.scale_ranks import STEPS, Counted
from dure.tools.bench.two_nodes import SeveralNodes

FACTS = {"torch": "2.13.0", "dure": "0.1.0", "python": "3.11", "job": "0123456789abcdef" * 4}
RANKS = 8
"""Of each simulated node."""
DEADLINE_SECONDS = 300.0
PARTS = ("membership", "sockets", "nodes")

Figures = dict[str, Any]


@dataclass
class Cost:
    """Of one thing that happens."""

    milliseconds: float = 0.0
    messages: int = 0
    bytes: int = 0


def bench_scale(
    *,
    nodes: Sequence[int] = (64, 256, 1024),
    agents: int = 256,
    trained: Sequence[int] = (3, 4, 8),
    only: Sequence[str] = PARTS,
) -> Figures:
    """The parts that `only` names."""
    for part in only:
        if part not in PARTS:
            raise UsageError(f"--only {part}: there is no such part; there are {', '.join(PARTS)}")
    figures: Figures = {}
    if "membership" in only:
        figures["membership"] = [{"nodes": count, **simulate(count)} for count in nodes]
    if "sockets" in only:
        figures["sockets"] = {"agents": agents, **over_sockets(agents)}
    if "nodes" in only:
        figures["nodes"] = train_on(trained)
    return figures


def in_words(figures: Figures) -> str:
    """Tables."""
    lines = []
    if "membership" in figures:
        lines += ["Membership alone: milliseconds, messages and kB that the leader sends", *_heads("nodes")]
        lines += [_line(str(row["nodes"]), row) for row in figures["membership"]]
    if "sockets" in figures:
        row = figures["sockets"]
        lines += ["", f"A real leader and {row['agents']} thin agents over loopback", *_heads("")]
        lines.append(_line("", row))
    if "nodes" in figures:
        lines += ["", "Training on nodes of this machine: kB that a node sends, medians over nodes"]
        lines.append(
            f"{'nodes':>6}{'ranks':>7}{'start':>9}{'replicate':>11}{'a step':>9}{'a ring':>9}{'proof':>8}  bits"
        )
        for row in figures["nodes"]:
            same = "as on 1 rank" if row["same_bits"] else "OTHER BITS"
            lines.append(
                f"{row['nodes']:>6}{row['ranks']:>7}{row['start'] / 1e3:>9,.1f}{row['replicate'] / 1e3:>11,.1f}"
                f"{row['step'] / 1e3:>9,.1f}{row['ring'] / 1e3:>9,.1f}{row['proof'] / 1e3:>8,.1f}  {same}"
            )
    return "\n".join(lines)


EVENTS = ("join", "one lost", "restart", "leader lost")


def simulate(count: int) -> dict[str, Figures]:
    """Everything that can happen to a team of so many nodes, told to the membership code one after the other."""
    if count < 2:
        raise UsageError(f"{count} node(s) are no team to lose one of; use 2 or more")
    restarts: list[object] = []
    terms = Terms(count, 1, FACTS, "/run", 300.0, max_restarts=3)
    run = Membership(terms, 0.0, lambda _: None, restarts.append)
    costs: dict[str, Cost] = {}

    def timed(what: str, happens: Callable[[_Sent], None]) -> None:
        sent, began = _Sent(), time.perf_counter()
        happens(sent)
        costs[what] = sent.cost((time.perf_counter() - began) * 1e3)

    def join(sent: _Sent) -> None:
        for node in range(count):
            sent.extend(run.hello(_hello(node), 1.0))
        _form(run, range(count), sent, number=1, now=2.0)

    def one_lost(sent: _Sent) -> None:
        sent.extend(run.lost(count - 1, "it left", 10.0))
        _form(run, range(count - 1), sent, number=2, now=11.0)

    def restart(sent: _Sent) -> None:
        failure = Failure("rank 1 was killed", rank=1, host="node0", may_pass=True)
        sent.extend(run.heard(0, Alive(step=5), 20.0))
        sent.extend(run.heard(0, Failed(2, failure), 20.0))
        _form(run, range(count - 1), sent, number=3, now=21.0)

    timed("join", join)
    timed("one lost", one_lost)
    timed("restart", restart)
    timed("leader lost", lambda sent: sent.extend(run.lost(LEADER, "it left", 30.0)))
    if not run.ended:
        raise DureError("a run without its leader goes on")
    return {name: vars(cost) for name, cost in costs.items()}


class _Sent(list[tuple[int, Message]]):
    """What the leader would send; counted when the clock has stopped."""

    def cost(self, milliseconds: float) -> Cost:
        return Cost(milliseconds, len(self), sum(len(messages.encode(message)) for _, message in self))


def _hello(node: int) -> Hello:
    return Hello(node, f"node{node}", f"10.{node >> 16}.{node >> 8 & 255}.{node & 255}", RANKS, FACTS)


def _form(run: Membership, nodes: Sequence[int], sent: _Sent, *, number: int, now: float) -> None:
    """All get ready, and the leader's store opens; raises unless that makes a team of all of them."""
    outgoing: Outgoing = []
    for node in nodes:
        outgoing = run.heard(node, Ready(), now)
        sent.extend(outgoing)
    if not outgoing:
        outgoing = run.tick(now + 10.0)
        sent.extend(outgoing)
    started = run.heard(LEADER, StoreUp(number, 4321), now + 10.0)
    sent.extend(started)
    if len(started) != len(nodes) - 1:
        raise DureError(f"{len(started) + 1} of {len(nodes)} nodes are in the team")


@dataclass
class _Agents:
    """Thin agents: connections to a real leader that say what an agent says."""

    address: tuple[str, int]
    key: TeamKey
    lines: dict[int, AgentConnection] = field(default_factory=dict)
    heard: dict[int, list[Message]] = field(default_factory=dict)
    messages: int = 0
    bytes: int = 0
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def connect(self, node: int) -> None:
        connection = reach_leader(*self.address, self.key, DEADLINE_SECONDS, lambda _: None, lambda: None)
        line = self.lines[node] = AgentConnection(connection)
        line.trust()
        self.heard[node] = []
        self._selector.register(connection, selectors.EVENT_READ, (node, line))
        line.send_message(_hello(node))

    def leave(self, node: int) -> None:
        """As a process that is killed leaves."""
        line = self.lines.pop(node)
        self._selector.unregister(line.socket)
        line.close()

    def tell(self, node: int, message: Message) -> None:
        self.lines[node].send_message(message)

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Hear what the leader says, until something is so."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        beaten = 0.0
        while not done():
            if time.monotonic() > deadline:
                raise DureError(f"timed out after {DEADLINE_SECONDS:.0f} s waiting for {what}")
            if time.monotonic() - beaten > 1.0:
                beaten = time.monotonic()
                for line in self.lines.values():
                    line.send_message(Alive())
            for key, _ in self._selector.select(0.01):
                node, line = key.data
                for message in line.messages():
                    if isinstance(message, Alive):
                        continue  # they come by the second, whatever happens
                    self.messages += 1
                    self.bytes += len(messages.encode(message))
                    self.heard[node].append(message)

    def form(self, nodes: Sequence[int], number: int) -> None:
        """All say that they are ready; the leader's own opens the store; all hear of the team."""
        for node in nodes:
            self.tell(node, Ready())
        self.wait(lambda: self._in(LEADER, number), "the leader's part of the team")
        self.tell(LEADER, StoreUp(number, 4321))
        self.wait(lambda: all(self._in(node, number) for node in nodes), "everybody's part of the team")

    def all_heard(self, kind: type[Message]) -> bool:
        return all(any(isinstance(said, kind) for said in self.heard[node]) for node in self.lines)

    def forget(self) -> None:
        for said in self.heard.values():
            said.clear()

    def _in(self, node: int, number: int) -> bool:
        return any(isinstance(said, Team) and said.number == number for said in self.heard[node])

    def close(self) -> None:
        close_all(list(self.lines.values()), 1.0)
        self._selector.close()


def over_sockets(count: int) -> dict[str, Figures]:
    """The same through a real leader's port, with so many connections; the agents share this process with it."""
    key, said = TeamKey.random(), list[str]()
    terms = Terms(count, 1, FACTS, "/run", DEADLINE_SECONDS, max_restarts=3)
    membership = Membership(terms, time.monotonic(), said.append, lambda _: None)
    costs: dict[str, Figures] = {}
    with contextlib.closing(listen_for_nodes("127.0.0.1", 0)) as listener:
        agents = _Agents(listener.getsockname()[:2], key)
        with Leader(listener, membership, DEADLINE_SECONDS, key), contextlib.closing(agents):

            def timed(what: str, happens: Callable[[], None]) -> None:
                agents.forget()
                sent, nbytes, began = agents.messages, agents.bytes, time.perf_counter()
                happens()
                costs[what] = vars(
                    Cost((time.perf_counter() - began) * 1e3, agents.messages - sent, agents.bytes - nbytes)
                )

            def join() -> None:
                for node in range(count):
                    agents.connect(node)
                agents.wait(lambda: agents.all_heard(messages.Welcome), "welcomes")
                agents.form(range(count), 1)

            def one_lost() -> None:
                agents.leave(count - 1)
                agents.wait(lambda: agents.all_heard(messages.Again), "the news of a lost node")
                agents.form(range(count - 1), 2)

            def restart() -> None:
                agents.tell(0, Failed(2, Failure("rank 1 was killed", rank=1, host="node0", may_pass=True)))
                agents.wait(lambda: agents.all_heard(messages.Again), "the news of a failure")
                agents.form(range(count - 1), 3)

            def leader_lost() -> None:
                agents.leave(LEADER)
                agents.wait(lambda: agents.all_heard(messages.End), "the news of the end")

            for what, happens in (
                ("join", join), ("one lost", one_lost), ("restart", restart), ("leader lost", leader_lost),
            ):  # fmt: skip
                timed(what, happens)
    return costs


def train_on(counts: Sequence[int], ranks_per_node: int = 1) -> list[Figures]:
    """A small model on so many nodes of this machine: the same bits as on one rank, and what goes over each wire."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="dure-bench-scale-") as path:
        call = ("dure.tools.bench.scale_ranks:train", (False,))
        (alone,) = cast("list[Counted]", run_team(*call, ranks=1, folder=RunFolder(Path(path) / "one")))
        for count in counts:
            with SeveralNodes(count) as nodes:
                found = cast(
                    "list[Counted]",
                    nodes.run_ranks(
                        call[0],
                        (True,),
                        ranks_per_node=ranks_per_node,
                        folder=RunFolder(Path(path) / str(count)),
                    ),
                )
            rows.append(_row(count, ranks_per_node, alone, found))
    return rows


def _row(count: int, ranks_per_node: int, alone: Counted, found: Sequence[Counted]) -> Figures:
    by_node = [one.sent for one in found[::ranks_per_node]]

    def of(phase: str) -> int:
        return int(statistics.median(sent[phase] for sent in by_node))

    ranks = count * ranks_per_node
    return {
        "nodes": count,
        "ranks": ranks,
        "same_bits": {one.weights_sha256 for one in found} == {alone.weights_sha256},
        "start": of("start"),
        "replicate": of("replicate"),
        "step": int(statistics.median(of(f"step {number}") for number in range(1, STEPS + 1))),
        "most_in_step": max(sent[f"step {number}"] for sent in by_node for number in range(1, STEPS + 1)),
        "ring": int(2 * (ranks - 1) / ranks * 4 * alone.parameters),
        "proof": of("proof"),
    }


def _heads(first: str) -> list[str]:
    return [f"{first:>6}" + "".join(f"{what:>30}" for what in EVENTS)]


def _line(first: str, row: Figures) -> str:
    cells = (
        f"{cost['milliseconds']:,.1f} ms {cost['messages']:,} {cost['bytes'] / 1e3:,.1f} kB"
        for cost in (row[what] for what in EVENTS)
    )
    return f"{first:>6}" + "".join(f"{cell:>30}" for cell in cells)
