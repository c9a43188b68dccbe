"""The leader's ear and mouth: a thread that connects all nodes' agents with the council."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from types import TracebackType
from typing import Any

from dure.launch.nodes.council import LEADER, Council, Letters
from dure.launch.nodes.line import Line
from dure.launch.nodes.messages import Alive, Bye, Hello, Refused
from dure.launch.port import listen_at

BEAT_SECONDS = 1.0
"""How often agents tell each other that they are there."""
_LOOK_SECONDS = 0.05
_FLUSH_SECONDS = 2.0
_SAY_SECONDS = 15.0
_HELLO_SECONDS = 10.0


def listen_for_nodes(address: str, port: int) -> socket.socket:
    """The leader's port."""
    listener = listen_at(
        address, port, "The leader is the node with --node-rank 0: is this its address, and the port free?"
    )
    listener.setblocking(False)
    return listener


class Leader:
    """Serves nodes until the run is over. The leader's own agent is one of them, over a local socket."""

    def __init__(self, listener: socket.socket, council: Council, lost_seconds: float) -> None:
        self._listener = listener
        self._council = council
        self._lost_seconds = lost_seconds
        self._lines: dict[int, Line] = {}
        self._strangers: list[tuple[Line, float]] = []
        self._selector = selectors.DefaultSelector()
        self._closing = threading.Event()
        self._said_at = self._beat_at = 0.0
        self._thread = threading.Thread(target=self._serve, name="dure-leader", daemon=True)

    def __enter__(self) -> Leader:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join(_FLUSH_SECONDS * 2 + 1.0)

    def connect(self) -> socket.socket:
        """A connection for the leader's own agent."""
        return socket.create_connection(self._listener.getsockname()[:2], timeout=10.0)

    @property
    def values(self) -> list[Any]:
        """What all ranks of all nodes returned, once the run is over."""
        return self._council.values

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
                if any(key.fileobj is self._listener for key, _ in events):
                    self._accept(now)
                self._meet_strangers(now)
                self._hear(now)
                self._post(self._council.tick(now))
                self._beat(now)
        finally:
            for line in [*self._lines.values(), *(line for line, _ in self._strangers)]:
                line.close(_FLUSH_SECONDS)
            self._listener.close()
            self._selector.close()

    def _accept(self, now: float) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._strangers.append((Line(connection), now))

    def _meet_strangers(self, now: float) -> None:
        still: list[tuple[Line, float]] = []
        for line, since in self._strangers:
            heard = line.receive()
            if heard and isinstance(heard[0], Hello):
                hello = heard[0]
                letters = self._council.hello(hello, now)
                refusal = next(
                    (m for node, m in letters if node == hello.node and isinstance(m, Refused)), None
                )
                if refusal is not None:
                    line.send(refusal)
                    line.close(0.5)
                    continue
                self._lines[hello.node] = line
                self._post(letters)
                for message in heard[1:]:
                    self._post(self._council.heard(hello.node, message, now))
            elif heard or line.closed or now - since > _HELLO_SECONDS:
                line.close()  # not an agent
            else:
                still.append((line, since))
        self._strangers = still

    def _hear(self, now: float) -> None:
        for node, line in list(self._lines.items()):
            line.flush()
            for message in line.receive():
                if isinstance(message, Bye):
                    line.closed = message.why or "it left"
                    break
                self._post(self._council.heard(node, message, now))
            silent = now - line.heard_at
            if not line.closed and silent > self._lost_seconds:
                line.closed = f"not heard of for {silent:.0f} s"
            if line.closed:
                self._lines.pop(node, None)
                line.close()
                self._post(self._council.lost(node, line.closed, now))

    def _post(self, letters: Letters) -> None:
        for node, message in letters:
            line = self._lines.get(node)
            if line is not None:
                line.send(message)

    def _beat(self, now: float) -> None:
        if now - self._beat_at >= BEAT_SECONDS:
            self._beat_at = now
            for line in self._lines.values():
                line.send(Alive())
        missing = self._council.missing()
        if missing and now - self._said_at >= _SAY_SECONDS:
            self._said_at = now
            if LEADER in self._lines:
                self._council.say(f"waits for {missing} (up to {self._council.terms.join_seconds:.0f} s)")
