"""Mutual authentication of a connection: both sides prove that they have a key, and neither shows it.

    caller   → listener   a nonce
    listener → caller     a nonce
    caller   → listener   HMAC(key, "caller",   purpose, both nonces)
    listener → caller     HMAC(key, "listener", purpose, both nonces)

The roles have different labels, so that a proof cannot be sent back as the answer to itself; the nonces are fresh, so
that none can be sent again; the purpose says which connection it is, and where the listener listens. The caller proves
first: who only connects gets random bytes and learns nothing. What follows is neither encrypted nor signed.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
import time
from collections import Counter
from dataclasses import dataclass

from dure.base.errors import DureError

SECONDS = 5.0
"""For one side to answer the other."""
_BYTES = 32
_LABEL = b"dure handshake 1"
PENDING = 64
"""Connections that are not authenticated yet, at once."""
_ACCEPTS = 16
"""At a time, before those that are connected already are looked at again."""


class NotAuthenticated(DureError):
    """The other side did not prove that it has the key."""


class Handshake:
    """One side of it. Pure: the caller of these methods moves the bytes."""

    def __init__(self, key: bytes, purpose: str, *, calls: bool) -> None:
        """`calls`: whether this side has opened the connection."""
        self.wants = _BYTES
        """How many bytes are to come before `take`; 0 when both sides have proved."""
        self._key = key
        self._purpose = purpose.encode()
        self._calls = calls
        self._own = secrets.token_bytes(_BYTES)
        self._theirs = b""

    def begin(self) -> bytes:
        """What to send first."""
        return self._own if self._calls else b""

    def take(self, data: bytes) -> bytes:
        """What to send in answer to the bytes that have come. Raises NotAuthenticated."""
        if len(data) != self.wants or not self.wants:
            raise NotAuthenticated("other bytes than the protocol's")
        if not self._theirs:
            self._theirs = data
            return self._proof(by_caller=True) if self._calls else self._own
        if not hmac.compare_digest(data, self._proof(by_caller=not self._calls)):
            raise NotAuthenticated("it does not have the team's key")
        self.wants = 0
        return b"" if self._calls else self._proof(by_caller=False)

    def _proof(self, *, by_caller: bool) -> bytes:
        nonces = (self._own, self._theirs) if self._calls else (self._theirs, self._own)
        role = b"caller" if by_caller else b"listener"
        said = b"".join(
            len(part).to_bytes(4, "big") + part for part in (_LABEL, role, self._purpose, *nonces)
        )
        return hmac.digest(self._key, said, "sha256")


def prove(connection: socket.socket, key: bytes, purpose: str, seconds: float = SECONDS) -> None:
    """The caller's side, on an open connection. Raises NotAuthenticated, or OSError for trouble of the network."""
    handshake = Handshake(key, purpose, calls=True)
    deadline = time.monotonic() + seconds
    connection.settimeout(seconds)
    connection.sendall(handshake.begin())
    proved = False
    while handshake.wants:
        data = b""
        while len(data) < handshake.wants:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            more = connection.recv(handshake.wants - len(data))
            if not more and proved:
                raise NotAuthenticated("it hung up: it does not have the same team key")
            if not more:
                raise ConnectionError("it hung up")
            data += more
        connection.sendall(handshake.take(data))
        proved = True


@dataclass
class _Pending:
    connection: socket.socket
    source: str
    handshake: Handshake
    since: float
    data: bytes = b""


class Acceptor:
    """The listener's side, for many connections at once; never waits.

    Strangers cost little: a connection that is not authenticated has a few bytes and `seconds`, and there are at most
    `most` of them. One more, and the oldest of the address that has most of them is closed: whoever opens many shuts
    out himself.
    """

    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        key: bytes,
        purpose: str,
        *,
        most: int = PENDING,
        seconds: float = SECONDS,
    ) -> None:
        """`selector` is told of the listener and of every connection; what it finds ready goes to `ready`."""
        self.turned_away = 0
        """How many connections were closed without having been authenticated."""
        self.last_source = ""
        """From which address the last of them came."""
        self._listener = listener
        self._selector = selector
        self._key = key
        self._purpose = purpose
        self._most = most
        self._seconds = seconds
        self._pending: dict[object, _Pending] = {}
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self)

    def ready(self, readable: object) -> socket.socket | None:
        """Go on with the listener, or with a connection, that has something; a connection that is authenticated."""
        if readable is self._listener:
            self._accept()
            return None
        pending = self._pending.get(readable)
        if pending is not None and self._goes_on(pending):
            self._forget(pending)
            return pending.connection
        return None

    def expire(self) -> None:
        """Close those that have had their time."""
        now = time.monotonic()
        for pending in [one for one in self._pending.values() if now - one.since > self._seconds]:
            self._turn_away(pending)

    def close(self) -> None:
        """Take no more connections, and close those that are not authenticated."""
        for pending in list(self._pending.values()):
            self._turn_away(pending)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            try:
                connection, source = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError:  # it is gone again, or there is no descriptor left
                self._make_room(at_least=1)
                return
            connection.setblocking(False)
            handshake = Handshake(self._key, self._purpose, calls=False)
            self._pending[connection] = _Pending(connection, str(source[0]), handshake, time.monotonic())
            self._selector.register(connection, selectors.EVENT_READ, self)
            self._make_room()

    def _goes_on(self, pending: _Pending) -> bool:
        """Take what has come, and answer it; whether both sides have proved now."""
        handshake = pending.handshake
        try:
            more = pending.connection.recv(handshake.wants - len(pending.data))
            if not more:
                raise ConnectionError("it hung up")
            pending.data += more
            if len(pending.data) == handshake.wants:
                answer = handshake.take(pending.data)
                pending.data = b""
                if pending.connection.send(answer) != len(answer):
                    raise ConnectionError("it takes nothing")
        except (BlockingIOError, InterruptedError):
            pass
        except (OSError, NotAuthenticated):
            self._turn_away(pending)
            return False
        return not handshake.wants

    def _make_room(self, at_least: int = 0) -> None:
        while self._pending and (len(self._pending) > self._most or at_least > 0):
            at_least -= 1
            ((busiest, _),) = Counter(one.source for one in self._pending.values()).most_common(1)
            self._turn_away(next(one for one in self._pending.values() if one.source == busiest))

    def _turn_away(self, pending: _Pending) -> None:
        self._forget(pending)
        pending.connection.close()
        self.turned_away += 1
        self.last_source = pending.source

    def _forget(self, pending: _Pending) -> None:
        del self._pending[pending.connection]
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(pending.connection)
