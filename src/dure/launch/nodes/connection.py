"""One connection between two agents: typed messages over `base.lines`, and never a wait."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time

from dure.base.lines import LineError, Lines
from dure.launch.nodes.messages import HELLO_BYTES, MESSAGE_BYTES, Message, decode, encode

_UNSENT_BYTES = MESSAGE_BYTES + (1 << 20)


class AgentConnection(Lines):
    """A connected socket. What no agent would do closes it, and `closed` says so."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # a pair of local sockets has no such option
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self._encrypting = threading.Lock()
        """An encrypted socket is not to be read by one thread while another writes."""
        descriptor = connection.fileno()
        super().__init__(descriptor, descriptor, longest=HELLO_BYTES, most_unsent=_UNSENT_BYTES)

    def trust(self) -> None:
        """The other side is known now: its messages may be long."""
        self.longest = MESSAGE_BYTES

    def send_message(self, message: Message) -> None:
        """Send, now or as soon as the other side takes it."""
        self.send(encode(message))

    def messages(self) -> list[Message]:
        """The whole messages that have come, up to the first that is none."""
        found: list[Message] = []
        for line in self.receive():
            try:
                found.append(decode(line))
            except LineError as error:
                self.closed = str(error)
                break
        return found

    def finish(self) -> None:
        """Say that nothing more will be sent; what the other side still says can be received."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(
                self.socket, socket.SHUT_WR
            )  # an encrypted one's own would end the decryption too

    def _take(self, most: int) -> bytes:
        if not isinstance(self.socket, ssl.SSLSocket):
            return super()._take(most)
        with self._encrypting:
            try:
                return self.socket.recv(
                    most
                )  # a record has at most as many bytes: none stays where no poll sees it
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise BlockingIOError from None

    def _put(self, chunk: bytearray) -> int:
        if not isinstance(self.socket, ssl.SSLSocket):
            return super()._put(chunk)
        with self._encrypting:
            try:
                return self.socket.send(chunk)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise BlockingIOError from None

    def close(self) -> None:
        """Close at once; what was sent and not taken is lost."""
        super().close()
        self.socket.close()


def close_all(connections: list[AgentConnection], seconds: float) -> None:
    """Close connections, after what was sent has gone out or the seconds, for all together, have passed."""
    deadline = time.monotonic() + seconds
    while any(one.has_more_to_send for one in connections) and time.monotonic() < deadline:
        for one in connections:
            one.flush()
        time.sleep(0.01)
    for one in connections:
        one.close()
