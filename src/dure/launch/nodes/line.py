"""One connection between two agents: whole messages in, whole messages out, never a wait."""

from __future__ import annotations

import contextlib
import socket
import time

from dure.launch.nodes.messages import Garbled, Message, decode, encode

_LONGEST = 64 * 1024 * 1024
_CHUNK = 1 << 16


class Line:
    """A connected socket. `send` and `receive` are called from one thread; neither blocks."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # a pair of local sockets has no such option
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.heard_at = time.monotonic()
        self.closed = ""
        """Why nothing comes any more, if so."""
        self._incoming = bytearray()
        self._outgoing = bytearray()

    @property
    def has_more_to_send(self) -> bool:
        """Whether the other side is slow to take what was sent."""
        return bool(self._outgoing) and not self.closed

    def send(self, message: Message) -> None:
        """Send, now or as soon as the other side takes it."""
        self._outgoing += encode(message)
        self.flush()

    def flush(self) -> None:
        """Send what was left over."""
        while self._outgoing and not self.closed:
            try:
                sent = self.socket.send(self._outgoing)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self.closed = error.strerror or str(error)
                return
            del self._outgoing[:sent]

    def receive(self) -> list[Message]:
        """All whole messages that have come; `closed` says when none will follow."""
        while not self.closed:
            try:
                chunk = self.socket.recv(_CHUNK)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self.closed = error.strerror or str(error)
                break
            if not chunk:
                self.closed = "the connection was closed"
                break
            self._incoming += chunk
            self.heard_at = time.monotonic()
            if len(self._incoming) > _LONGEST:
                self.closed = "a message without an end"
        messages: list[Message] = []
        *whole, rest = self._incoming.split(b"\n")
        self._incoming = bytearray(rest)
        for line in whole:
            try:
                messages.append(decode(bytes(line)))
            except Garbled as error:
                self.closed = str(error)
                break
        return messages

    def close(self, flush_seconds: float = 0.0) -> None:
        """Close, after what was sent has gone out or the seconds have passed."""
        deadline = time.monotonic() + flush_seconds
        while self.has_more_to_send and time.monotonic() < deadline:
            self.flush()
            time.sleep(0.01)
        self.socket.close()
