"""One connection between two agents: whole messages in, whole messages out, never a wait."""

from __future__ import annotations

import contextlib
import socket
import time

from dure.launch.nodes.messages import HELLO_BYTES, MESSAGE_BYTES, Garbled, Message, decode, encode

_CHUNK = 1 << 16
_TURN_BYTES = 1 << 20
"""How much is taken from one connection before the others have their turn."""
_UNSENT_BYTES = MESSAGE_BYTES + (1 << 20)


class AgentConnection:
    """A connected socket. `send` and `receive` are called from one thread; neither blocks.

    What no agent would do closes it, and says so in `closed`: a line that is too long or not a message, or not taking
    what is sent.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # a pair of local sockets has no such option
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.heard_at = time.monotonic()
        self.closed = ""
        """Why nothing comes any more, if so."""
        self._longest = HELLO_BYTES
        self._incoming = bytearray()
        self._outgoing = bytearray()

    @property
    def has_more_to_send(self) -> bool:
        """Whether the other side is slow to take what was sent."""
        return bool(self._outgoing) and not self.closed

    def trust(self) -> None:
        """The other side is known now: its messages may be long."""
        self._longest = MESSAGE_BYTES

    def send(self, message: Message) -> None:
        """Send, now or as soon as the other side takes it."""
        self._outgoing += encode(message)
        self.flush()
        if len(self._outgoing) > _UNSENT_BYTES and not self.closed:
            self.closed = f"it has not taken {len(self._outgoing)} bytes that were sent to it"

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
        """The whole messages that have come; `closed` says when none will follow."""
        messages: list[Message] = []
        taken = 0
        while not self.closed and taken < _TURN_BYTES:
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
            taken += len(chunk)
            self.heard_at = time.monotonic()
            self._incoming += chunk
            if b"\n" in chunk:
                self._take_lines(messages)
            if len(self._incoming) > self._longest:
                self.closed = "a message without an end"
        return messages

    def _take_lines(self, messages: list[Message]) -> None:
        *whole, rest = self._incoming.split(b"\n")
        self._incoming = rest
        for line in whole:
            if len(line) > self._longest:
                self.closed = f"a message of {len(line)} bytes"
                return
            try:
                messages.append(decode(bytes(line)))
            except Garbled as error:
                self.closed = str(error)
                return

    def finish(self) -> None:
        """Say that nothing more will be sent; what the other side still says can be received."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close at once; what was sent and not taken is lost."""
        self.socket.close()


def close_all(lines: list[AgentConnection], seconds: float) -> None:
    """Close connections, after what was sent has gone out or the seconds, for all together, have passed."""
    deadline = time.monotonic() + seconds
    while any(line.has_more_to_send for line in lines) and time.monotonic() < deadline:
        for line in lines:
            line.flush()
        time.sleep(0.01)
    for line in lines:
        line.close()
