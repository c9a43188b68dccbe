"""A TCP connection of this rank's own to its peer on the other node: both directions at once, in one thread.

Gloo's point-to-point calls go through a thread and a header a message; with several ranks a core that costs
more than the wire. Here the caller itself sends what it has, takes what has come, and adds in between.
"""

from __future__ import annotations

import hmac
import json
import secrets
import select
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Protocol

from dure.base.errors import PeerLost
from dure.comm.group import Group
from dure.comm.handshake import PENDING, Acceptor, NotAuthenticated, prove

LAY_SECONDS = 10.0
"""For connecting; a node that cannot be reached this way is reached by the backend instead."""
_TOKEN_BYTES = 32


class Parcel(Protocol):
    """What goes to the peer and what comes back for it, in order."""

    def pack(self) -> Sequence[memoryview]:
        """Make ready what goes; called once, as late as the wire allows."""
        ...

    def space(self) -> Sequence[memoryview]:
        """Where what comes is put."""
        ...

    def unpack(self) -> None:
        """What is for it has come; it was packed before."""
        ...


class Link:
    """Connected. Used by one thread."""

    def __init__(self, connection: socket.socket, rank: int, peer: int, deadline_seconds: float) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._rank = rank
        self._peer = peer
        self._deadline_seconds = deadline_seconds

    def swap(self, parcels: Sequence[Parcel], what: str) -> None:
        """Send all parcels and unpack all that come; raises PeerLost, naming the peer, if it is gone or late."""
        packed = unpacked = 0
        going: list[memoryview] = []  # last first, as is what comes
        coming = [*reversed(parcels[0].space())] if parcels else []
        while going or unpacked < len(parcels):
            moved = self._send(going, what)
            moved |= self._receive(coming, what)
            if packed < len(parcels) and not (going and moved):
                going[:0] = reversed(parcels[packed].pack())  # adding, while the wire is busy
                packed += 1
            elif unpacked < packed and not coming:
                parcels[unpacked].unpack()
                unpacked += 1
                coming = [*reversed(parcels[unpacked].space())] if unpacked < len(parcels) else []
            elif not moved:
                self._wait(bool(going), what)

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def _send(self, going: list[memoryview], what: str) -> bool:
        """As much as the wire takes now; whether that was anything. `going` keeps the rest, last first."""
        moved = False
        while going:
            try:
                count = self._connection.send(going[-1])
            except BlockingIOError:
                return moved
            except OSError as error:
                raise self._lost(what, error) from error
            _shorten(going, count)
            moved = True
        return moved

    def _receive(self, coming: list[memoryview], what: str) -> bool:
        moved = False
        while coming:
            try:
                count = self._connection.recv_into(coming[-1])
            except BlockingIOError:
                return moved
            except OSError as error:
                raise self._lost(what, error) from error
            if count == 0:
                raise self._lost(what, "it hung up")
            _shorten(coming, count)
            moved = True
        return moved

    def _wait(self, sends: bool, what: str) -> None:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN | (select.POLLOUT if sends else 0))
        if not poll.poll(self._deadline_seconds * 1e3):
            raise self._lost(what, f"nothing moved for {self._deadline_seconds:.0f} s")

    def _lost(self, what: str, why: object) -> PeerLost:
        return PeerLost(f"rank {self._rank} lost rank {self._peer} in {what}: {why}")


def lay_link(
    everyone: Group,
    peer: int,
    *,
    listens: bool,
    leader_host: str,
    deadline_seconds: float,
    secret: bytes = b"",
) -> Link | None:
    """Connect every rank with its peer, `listens` being true for one of the two; a collective call.

    None, on all ranks, where one pair cannot connect. A listener is open on the address that the leader is
    reached from, for one connection. Both sides prove to each other that they are this pair of ranks: that they have
    the `secret` that their agents gave them, and what the two told each other just now over the group.
    """
    listener, told, trouble = None, _Told("", 0, secrets.token_hex(_TOKEN_BYTES)), ""
    if listens:
        try:
            own = _address_towards(leader_host)
            family = socket.AF_INET6 if ":" in own else socket.AF_INET
            listener = socket.create_server((own, 0), family=family, backlog=PENDING)
            host, port = listener.getsockname()[:2]
            told = _Told(host, port, told.token)
        except OSError as error:
            trouble = str(error)
    everyones = everyone.gather(json.dumps(astuple(told)), "laying links between nodes")
    connection = None
    if not trouble:
        try:
            theirs = _Told.from_text(everyones[peer])
            ranks = sorted((everyone.rank, peer))
            tokens = [told.token if rank == everyone.rank else theirs.token for rank in ranks]
            key = hmac.digest(secret, "\0".join(("dure link key 1", *tokens)).encode(), "sha256")
            if listener is not None:
                connection = _accepted(listener, key, _purpose(ranks, told))
            else:
                connection = _connected(theirs, key, _purpose(ranks, theirs))
        except (OSError, NotAuthenticated) as error:
            trouble = str(error) or type(error).__name__
    if listener is not None:
        listener.close()
    troubles = everyone.gather(trouble, "laying links between nodes")
    if connection is not None and any(troubles):
        connection.close()
        connection = None
    return Link(connection, everyone.rank, peer, deadline_seconds) if connection is not None else None


@dataclass(frozen=True)
class _Told:
    """What a rank tells its peer over the group."""

    host: str
    """Where it listens; "" when it does not, or cannot."""
    port: int
    token: str
    """Fresh, for the key of this connection alone."""

    @classmethod
    def from_text(cls, text: str) -> _Told:
        """The inverse of JSON; raises OSError for what no rank tells."""
        try:
            host, port, token = json.loads(text)
        except (ValueError, TypeError, RecursionError):
            raise OSError("the peer told no address") from None
        if not (
            isinstance(host, str) and type(port) is int and isinstance(token, str) and 0 <= port < 1 << 16
        ):
            raise OSError("the peer told no address")
        return cls(host, port, token)


def _purpose(ranks: Sequence[int], listener: _Told) -> str:
    return f"link of ranks {ranks} at {listener.host}:{listener.port}"


def _address_towards(host: str) -> str:
    """This node's own address on the way to another."""
    family, *_, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing: it only asks for the route
        return str(probe.getsockname()[0])


def _accepted(listener: socket.socket, key: bytes, purpose: str) -> socket.socket:
    """The connection that proves to be the peer's; strangers are hung up on, and keep nobody waiting."""
    deadline = time.monotonic() + LAY_SECONDS
    with selectors.DefaultSelector() as selector:
        acceptor = Acceptor(listener, selector, key, purpose)
        try:
            while (left := deadline - time.monotonic()) > 0:
                for ready, _ in selector.select(min(left, 1.0)):
                    found = acceptor.ready(ready.fileobj)
                    if found is not None:
                        return found
                acceptor.expire()
        finally:
            acceptor.close()
    raise OSError(f"the peer did not connect within {LAY_SECONDS:.0f} s")


def _connected(peer: _Told, key: bytes, purpose: str) -> socket.socket:
    if not peer.host:
        raise OSError("the peer could not listen")
    connection = socket.create_connection((peer.host, peer.port), LAY_SECONDS)
    try:
        prove(connection, key, purpose)
    except BaseException:
        connection.close()
        raise
    return connection


def _shorten(views: list[memoryview], count: int) -> None:
    if count == len(views[-1]):
        views.pop()
    else:
        views[-1] = views[-1][count:]
