"""A node's agent in the run: it says how its ranks are, and hears from the leader what to do."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from dure.base.errors import DureError, PeerLost, Resumable, UsageError
from dure.base.team_key import TeamKey
from dure.comm.handshake import NotAuthenticated, prove
from dure.launch.nodes.connection import AgentConnection, close_all
from dure.launch.nodes.encrypt import Encryption
from dure.launch.nodes.leader import BEAT_SECONDS, agents_key, agents_purpose
from dure.launch.nodes.messages import (
    Again,
    Alive,
    Bye,
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

_LOOK_SECONDS = 0.05
_KNOCK_SECONDS = 0.5
_WELCOME_SECONDS = 15.0
_FLUSH_SECONDS = 2.0
_PROOFS = 4
"""How often a key is offered before it is the wrong one: a leader that is busy with strangers may hang up, too."""


class NodeTaken(UsageError):
    """Another node has this one's number, or this one itself had it and has not been missed yet."""


def reach_leader(
    address: str,
    port: int,
    key: TeamKey,
    seconds: float,
    say: Callable[[str], None],
    check: Callable[[], None],
    encryption: Encryption | None = None,
    resolve_again: Callable[[], str] | None = None,
) -> socket.socket:
    """Connect to the leader, who may start later than this node; both prove that they have the team's key.

    `resolve_again` looks the leader's name up: a leader that was started again may have another address.
    """
    deadline = time.monotonic() + seconds
    told = False
    trouble = "no answer"
    proofs = 0
    while time.monotonic() < deadline:
        check()
        try:
            return _proved(
                socket.create_connection((address, port), timeout=2.0), key, address, port, encryption
            )
        except NotAuthenticated as error:
            proofs += 1
            if proofs == _PROOFS:
                raise UsageError(
                    f"what listens at {address}:{port} does not have this node's team key ({error}); give all nodes "
                    "the same --team-key, or the key that the leader has printed"
                ) from None
            trouble = str(error)
        except OSError as error:
            trouble = error.strerror or str(error)
            if resolve_again is not None:
                with contextlib.suppress(UsageError):
                    address = resolve_again()
        if not told:
            told = True
            say(f"waits for the leader at {address}:{port} (up to {seconds:.0f} s): {trouble}")
        time.sleep(_KNOCK_SECONDS)
    raise PeerLost(
        f"timed out after {seconds:.0f} s connecting to the leader at {address}:{port}: {trouble}. "
        "Start the same command there with --node-rank 0; if it runs, a firewall may be in between: "
        "`dure doctor` finds it."
    )


def _proved(
    connection: socket.socket, key: TeamKey, address: str, port: int, encryption: Encryption | None
) -> socket.socket:
    try:
        prove(connection, agents_key(key), agents_purpose(address, port))
        if encryption is not None:
            return encryption.call(connection)
    except BaseException:
        connection.close()
        raise
    return connection


class Member:
    """This node's side of the connection with the leader. A thread keeps it alive; the agent asks and tells."""

    def __init__(
        self, connection: socket.socket, hello: Hello, lost_seconds: float, *, resumable: bool = True
    ) -> None:
        self.hello = hello
        self._resumable = resumable
        self.leader = connection.getpeername()[0]
        self._line = AgentConnection(connection)
        self._line.trust()
        self._lost_seconds = lost_seconds
        self._lock = threading.Lock()
        self._inbox: list[Message] = []
        self._step = -1
        self._lost = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._attend, name="dure-member", daemon=True)

    def __enter__(self) -> Member:
        self._line.send_message(self.hello)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._send(Bye(str(error).splitlines()[0] if str(error) else type(error).__name__))
        self._closing.set()
        self._thread.join(_FLUSH_SECONDS + 1.0)
        close_all([self._line], _FLUSH_SECONDS if not self._lost else 0.0)

    def welcome(self, check: Callable[[], None]) -> str:
        """Where the run keeps its files; raises UsageError when the leader wants us not, NodeTaken when not yet."""
        deadline = time.monotonic() + _WELCOME_SECONDS
        while time.monotonic() < deadline:
            check()
            match self._next(Welcome, Refused, End):
                case Welcome(run):
                    return run
                case Refused(why, may_pass):
                    refused = NodeTaken if may_pass else UsageError
                    raise refused(f"the leader at {self.leader} does not take this node: {why}")
                case End() as end:
                    raise end.error() or DureError("the run is over already")
            time.sleep(_LOOK_SECONDS)
        raise UsageError(
            f"what listens at {self.leader} does not answer as a leader within {_WELCOME_SECONDS:.0f} s; is it another "
            "program's port?"
        )

    def next_team(self, check: Callable[[], None]) -> Team:
        """Say that no rank runs here, and wait for the team to be in. The leader has the deadline."""
        self._send(Ready())
        while True:
            check()
            match self._next(Team, Again, End):
                case Team() as team:
                    return team
                case Again():
                    self._send(Ready())  # the team fell apart before this node heard of it
                case End() as end:
                    raise end.error() or DureError("the run ended before this node took part")
            time.sleep(_LOOK_SECONDS)

    def store_is_up(self, team: int, port: int) -> None:
        """The leader's own node: the ranks' store is open."""
        self._send(StoreUp(team, port))

    def tell(self, message: Failed | Done) -> None:
        """Tell the leader how the ranks of this node are."""
        self._send(message)

    def has_got_to(self, step: int) -> None:
        """Note the furthest step; it goes out with the next beat."""
        self._step = step

    def order(self, team: int) -> Again | End | None:
        """What the leader wants of the ranks of a team, if anything. Raises Resumable when the leader is lost."""
        while (message := self._next(Again, End)) is not None:
            if isinstance(message, End) or (isinstance(message, Again) and message.team == team):
                return message
        return None

    def _next(self, *kinds: type[Message]) -> Any:
        with self._lock:
            for at, message in enumerate(self._inbox):
                if isinstance(message, kinds):
                    return self._inbox.pop(at)
            lost = self._lost
        if lost:
            words = f"the leader, {self.leader}, is lost: {lost}; the ranks of this node are ended"
            if not self._resumable:
                raise DureError(words)
            raise Resumable(
                f"{words}. Resumable: started again, with any node as the leader, the run goes on from the newest "
                "checkpoint"
            )
        return None

    def _send(self, message: Message) -> None:
        with self._lock:
            self._line.send_message(message)

    def _attend(self) -> None:
        beat_at = 0.0
        selector = selectors.DefaultSelector()
        selector.register(self._line.socket, selectors.EVENT_READ)
        looked_at = time.monotonic()
        try:
            while not self._closing.is_set() and not self._lost:
                selector.select(_LOOK_SECONDS)
                now = time.monotonic()
                with self._lock:
                    if now - looked_at > self._lost_seconds / 2:
                        self._line.heard_at = now  # it was us who did not listen
                    looked_at = now
                    messages = [m for m in self._line.messages() if not isinstance(m, Alive)]
                    self._inbox += messages
                    if now - beat_at >= BEAT_SECONDS:
                        beat_at = now
                        self._line.send_message(Alive(self._step))
                    self._line.flush()
                    silent = now - self._line.heard_at
                    if self._line.closed or silent > self._lost_seconds:
                        self._lost = self._line.closed or f"not heard of for {silent:.0f} s"
        except Exception as error:  # a thread that ends without a word would leave the agent waiting
            self._lost = f"its message could not be handled ({type(error).__name__}: {error})"
        finally:
            with contextlib.suppress(OSError, KeyError):
                selector.close()
