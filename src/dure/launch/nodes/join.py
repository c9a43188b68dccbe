"""How a node comes into a run: as its leader, or by finding the leader."""

from __future__ import annotations

import contextlib
import queue
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dure.base.errors import UsageError
from dure.base.run_folder import RunFolder
from dure.base.team_key import TeamKey
from dure.comm.link_secret import offered
from dure.launch.lease import Lease
from dure.launch.nodes.address import choose_interface, resolve
from dure.launch.nodes.encrypt import encryption_of
from dure.launch.nodes.leader import Leader, listen_for_nodes
from dure.launch.nodes.member import Member, NodeTaken, reach_leader
from dure.launch.nodes.membership import LEADER, Membership, Terms
from dure.launch.nodes.messages import Hello
from dure.launch.restart_policy import Restart, UnsavedScript

_TAKEN_SECONDS = 10.0
"""Beyond twice `lost_seconds`: until a node that was cut off has been missed, and has ended."""
_ASK_AGAIN_SECONDS = 0.5


@dataclass(frozen=True)
class Nodes:
    """What a node knows of the run before it has met anyone."""

    count: int
    fewest: int
    node: int
    leader: str
    """A name or an address."""
    port: int
    ranks: int
    """On this node."""
    interface: str | None
    join_seconds: float
    lost_seconds: float
    max_restarts: int
    facts: dict[str, str]
    """What must be the same on all nodes."""
    tls: bool = False
    """Whether what the agents tell each other is encrypted."""
    is_job: bool = True
    """A job has one folder for all nodes, and goes on from what it has saved; a script has a folder a node."""
    script: UnsavedScript | None = None
    """What holds for a script until it saves, as the leader sees it."""

    @property
    def leads(self) -> bool:
        """Whether this node is the leader."""
        return self.node == LEADER


@dataclass(frozen=True)
class Joined:
    """A node in a run."""

    member: Member
    leader: Leader | None
    """On the leader's node only."""
    run: Path
    interface: str
    address: str
    news: queue.SimpleQueue[str | Restart]
    """What the leader has to tell the user; always empty on other nodes."""
    nodes: int
    """How many may take part."""
    lease: Lease
    secret: Mapping[str, str]
    """Variables by which ranks find what they prove to those of other nodes."""

    @property
    def environment(self) -> dict[str, str]:
        """What makes the ranks' libraries talk over the right interface, by its name, not by a guess."""
        return {
            "GLOO_SOCKET_IFNAME": self.interface,
            "NCCL_SOCKET_IFNAME": self.interface,
            **self.secret,
        }

    def values(self) -> list[Any]:
        """What all ranks returned, on the leader's node."""
        return self.leader.values if self.leader is not None else []


@contextlib.contextmanager
def join(
    nodes: Nodes,
    key: TeamKey,
    lease: Lease,
    choose_run: Callable[[], Path],
    say: Callable[[str], None],
    check: Callable[[], None],
) -> Iterator[Joined]:
    """Come into the run; `choose_run` makes its folder, on the leader's node. `check` is called in waits."""
    address = resolve(nodes.leader)
    interface, own_address = choose_interface(address, nodes.interface)
    hello = Hello(nodes.node, socket.gethostname(), own_address, nodes.ranks, nodes.facts)
    news: queue.SimpleQueue[str | Restart] = queue.SimpleQueue()
    encryption = encryption_of(key) if nodes.tls else None
    with contextlib.ExitStack() as stack:
        leader = None
        if nodes.leads:
            listener = stack.enter_context(contextlib.closing(listen_for_nodes(address, nodes.port)))
            run = RunFolder(choose_run())
            terms = Terms(
                nodes.count,
                nodes.fewest,
                nodes.facts,
                str(run.path),
                nodes.join_seconds,
                nodes.max_restarts,
                nodes.is_job,
                nodes.script,
            )
            membership = Membership(terms, time.monotonic(), news.put, news.put, run.asked_to_stop)
            leader = stack.enter_context(
                Leader(listener, membership, nodes.lost_seconds, key, encryption, lease.lost_nodes)
            )

        def connect() -> socket.socket:
            again = None if nodes.leads else partial(resolve, nodes.leader)
            return reach_leader(address, nodes.port, key, nodes.join_seconds, say, check, encryption, again)

        member, told = _welcomed(stack, nodes, hello, connect, say, check)
        path = Path(told) if nodes.is_job or nodes.leads else choose_run()
        if not path.is_dir():
            raise UsageError(
                f"the run's folder, {path}, is not there on {socket.gethostname()}: it must be on storage that all "
                "nodes see at the same path; give such a --run-dir, or mount the storage"
            )
        secret = stack.enter_context(offered(key.derived("data links")))
        yield Joined(member, leader, path, interface, own_address, news, nodes.count, lease, secret)


def _welcomed(
    stack: contextlib.ExitStack,
    nodes: Nodes,
    hello: Hello,
    connect: Callable[[], socket.socket],
    say: Callable[[str], None],
    check: Callable[[], None],
) -> tuple[Member, str]:
    """This node's connection with the leader, and where the run is.

    A node that was cut off and is started again finds its number taken, by itself, until the leader has missed it.
    """
    seconds = 2 * nodes.lost_seconds + _TAKEN_SECONDS
    deadline: float | None = None
    while True:
        with contextlib.ExitStack() as attempt:
            member = attempt.enter_context(
                Member(connect(), hello, nodes.lost_seconds, resumable=nodes.is_job)
            )
            try:
                run = member.welcome(check)
            except NodeTaken as taken:
                if deadline is None:
                    deadline = time.monotonic() + seconds
                    say(f"{taken}; waits up to {seconds:.0f} s for that node to be missed")
                elif time.monotonic() > deadline:
                    raise
            else:
                stack.push(attempt.pop_all())
                return member, run
        time.sleep(_ASK_AGAIN_SECONDS)
