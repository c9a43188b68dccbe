"""The leader's connections: a thread that moves messages between all nodes' agents and the membership.

Whatever comes over a connection costs at most that connection. Before it is authenticated nothing is said on it
(`Acceptor`); after that a message that is none, a line without an end, a reader that does not read, or a fault of ours
in handling it closes it, and its node is lost.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from dure.base.team_key import TeamKey
from dure.comm.handshake import PENDING, Acceptor
from dure.launch.nodes.connection import AgentConnection, close_all
from dure.launch.nodes.encrypt import Encryption
from dure.launch.nodes.membership import LEADER, Membership, Outgoing
from dure.launch.nodes.messages import Alive, Bye, Hello, Message, Refused
from dure.launch.port import listen_at

BEAT_SECONDS = 1.0
"""How often agents tell each other that they are there."""
_LOOK_SECONDS = 0.05
_FLUSH_SECONDS = 2.0
_SAY_SECONDS = 15.0
_SAY_STRANGERS_SECONDS = 60.0
_HELLO_SECONDS = 10.0


def agents_key(key: TeamKey) -> bytes:
    """What agents and the leader prove to each other."""
    return key.derived("agents")


def agents_purpose(address: str, port: int) -> str:
    """Which connection it is: that of an agent to the leader at this address."""
    return f"agent to leader {address}:{port}"


def listen_for_nodes(address: str, port: int) -> socket.socket:
    """The leader's port."""
    return listen_at(
        address, port, "The leader is the node with --node-rank 0: is this its address, and the port free?"
    )


class Leader:
    """Serves nodes until the run is over. The leader's own agent is one of them, and connects like the others."""

    def __init__(
        self,
        listener: socket.socket,
        membership: Membership,
        lost_seconds: float,
        key: TeamKey,
        encryption: Encryption | None = None,
        lost_nodes: Callable[[], Iterable[tuple[int, str]]] = tuple,
    ) -> None:
        """With `encryption`, what follows the proof of the key is encrypted.

        `lost_nodes` says which nodes are known to be lost since it was asked last, and why.
        """
        self._encryption = encryption
        self._membership = membership
        self._lost_nodes = lost_nodes
        self._lost_seconds = lost_seconds
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(
            listener,
            self._selector,
            agents_key(key),
            agents_purpose(*listener.getsockname()[:2]),
            most=max(PENDING, 2 * membership.terms.nodes),
        )
        self._lines: dict[int, AgentConnection] = {}
        """Of the nodes that were welcomed."""
        self._new: dict[AgentConnection, float] = {}
        """Authenticated, without a Hello yet, and since when."""
        self._refused: dict[AgentConnection, float] = {}
        """To be closed when the other side has closed, or at a time."""
        self._nodes: dict[AgentConnection, int] = {}
        """The inverse of `_lines`."""
        self._looked_over_at = 0.0
        self._told_of_strangers = 0
        self._said_at = self._said_strangers_at = self._beat_at = 0.0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="dure-leader", daemon=True)

    def __enter__(self) -> Leader:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join(_FLUSH_SECONDS * 2 + 1.0)

    @property
    def values(self) -> list[Any]:
        """What all ranks of all nodes returned, once the run is over."""
        return self._membership.values

    def _serve(self) -> None:
        try:
            looked_at = time.monotonic()
            while not self._closing.is_set():
                events = self._selector.select(_LOOK_SECONDS)
                now = time.monotonic()
                if now - looked_at > self._lost_seconds / 2:
                    # We were stopped, or the machine slept: nobody could be heard meanwhile.
                    for line in self._lines.values():
                        line.heard_at = now
                looked_at = now
                for key, _ in events:
                    if key.data is self._acceptor:
                        self._accept(key.fileobj, now)
                    else:
                        self._hear(key.data, now)
                        if key.data.closed:
                            self._looked_over_at = (
                                0.0  # or it would be readable, and wake us, until we look again
                            )
                self._acceptor.expire()
                self._post(self._membership.tick(now))
                self._beat(now)
                # All connections, but not after every message: N nodes' beats would cost N squared looks.
                if now - self._looked_over_at >= _LOOK_SECONDS:
                    self._looked_over_at = now
                    self._let_go(now)
        finally:
            self._acceptor.close()
            close_all([*self._lines.values(), *self._new, *self._refused], _FLUSH_SECONDS)
            self._selector.close()

    def _accept(self, readable: object, now: float) -> None:
        connection = self._acceptor.ready(readable)
        if connection is not None:
            if self._encryption is not None:
                try:
                    connection = self._encryption.answer(connection)
                except OSError:  # it is gone again
                    connection.close()
                    return
            line = AgentConnection(connection)
            self._new[line] = now
            self._selector.register(connection, selectors.EVENT_READ, line)

    def _hear(self, line: AgentConnection, now: float) -> None:
        """Take what a connection has brought; whatever is wrong with it is that connection's end."""
        try:
            line.flush()
            for message in line.messages():
                if line in self._refused:
                    continue
                if line in self._new:
                    self._introduce(line, message, now)
                elif isinstance(message, Bye):
                    line.closed = message.why or "it left"
                    break
                else:
                    self._post(self._membership.heard(self._nodes[line], message, now))
        except Exception as error:  # one node's message must not end the run of all
            line.closed = f"its message could not be handled ({type(error).__name__}: {error})"

    def _introduce(self, line: AgentConnection, message: Message, now: float) -> None:
        """The first message of a connection, which must be a Hello."""
        del self._new[line]
        self._refused[line] = now + _FLUSH_SECONDS
        if not isinstance(message, Hello):
            line.closed = "it did not say hello"
            return
        outgoing = self._membership.hello(message, now)
        refused = [said for node, said in outgoing if node == message.node and isinstance(said, Refused)]
        if refused:
            line.send_message(refused[0])
            line.finish()  # and not close: while it sends, that could take the refusal away again
            return
        del self._refused[line]
        line.trust()
        self._lines[message.node] = line
        self._nodes[line] = message.node
        self._post(outgoing)

    def _let_go(self, now: float) -> None:
        """Close the connections that are over, and tell the membership of the nodes that are lost with them."""
        for node, why in self._lost_nodes():
            if node in self._lines and node != LEADER:
                self._lines[node].closed = why
        for node, line in list(self._lines.items()):
            silent = now - line.heard_at
            if not line.closed and silent > self._lost_seconds:
                line.closed = f"not heard of for {silent:.0f} s"
            elif not line.closed and node not in self._membership.members:
                line.closed = "the membership has let it go"
            if line.closed:
                del self._lines[node], self._nodes[line]
                self._forget(line)
                self._post(self._membership.lost(node, line.closed, now))
            else:
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.has_more_to_send else 0)
                if self._selector.get_key(line.socket).events != wanted:
                    self._selector.modify(line.socket, wanted, line)
        for line, since in list(self._new.items()):
            if line.closed or now - since > _HELLO_SECONDS:
                del self._new[line]
                self._forget(line)
        for line, until in list(self._refused.items()):
            if line.closed or now > until:
                del self._refused[line]
                self._forget(line)

    def _forget(self, line: AgentConnection) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(line.socket)
        line.close()

    def _post(self, outgoing: Outgoing) -> None:
        for node, message in outgoing:
            line = self._lines.get(node)
            if line is not None:
                line.send_message(message)

    def _beat(self, now: float) -> None:
        if now - self._beat_at >= BEAT_SECONDS:
            self._beat_at = now
            for line in self._lines.values():
                line.send_message(Alive())
        missing = self._membership.missing()
        if missing and now - self._said_at >= _SAY_SECONDS:
            self._said_at = now
            if LEADER in self._lines:
                self._membership.say(
                    f"waits for {missing} (up to {self._membership.terms.join_seconds:.0f} s)"
                )
        strangers = self._acceptor.turned_away - self._told_of_strangers
        if strangers and now - self._said_strangers_at >= _SAY_STRANGERS_SECONDS:
            self._said_strangers_at, self._told_of_strangers = now, self._acceptor.turned_away
            self._membership.say(
                f"{strangers} connection(s) without the team's key were closed, the last from "
                f"{self._acceptor.last_source}; a node of this run needs the same --team-key"
            )
