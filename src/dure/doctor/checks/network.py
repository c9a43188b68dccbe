"""A node's two ends of a connection: it listens for the others, and calls them."""

from __future__ import annotations

import contextlib
import selectors
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

from dure.comm.handshake import Acceptor, NotAuthenticated, prove

CONNECT_SECONDS = 3.0
_ANSWER_SECONDS = 20.0
_SEND_SECONDS = 0.25
_LOOK_SECONDS = 0.5
_ROUNDS = 20
_CHUNK = 1 << 20
_PING, _FLOOD = b"p", b"f"


class Listener:
    """Answers calls at one address, on the leader's port and on one that the system chose, as Gloo's are.

    Only those of nodes that were told the same `token`; strangers are hung up on.
    """

    def __init__(self, address: str, port: int, token: str) -> None:
        self._token = token
        self._closing = threading.Event()
        self.taken = False
        """Whether somebody else listens at the leader's port."""
        self._sockets = []
        try:
            self._sockets.append(self._listen(address, port))
        except OSError:
            self.taken = True
        self._sockets.append(self._listen(address, 0))
        self.ports = [one.getsockname()[1] for one in self._sockets]

    def close(self) -> None:
        """Listen no more."""
        self._closing.set()
        for one in self._sockets:
            # Wakes the thread that waits for callers, and closes it.
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _listen(self, address: str, port: int) -> socket.socket:
        # Two nodes of a test may be one machine: those that look must not be in each other's way.
        listener = socket.create_server((address, port), reuse_port=True)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return listener

    def _accept(self, listener: socket.socket) -> None:
        purpose = _purpose(*listener.getsockname()[:2])
        with selectors.DefaultSelector() as selector:
            acceptor = Acceptor(listener, selector, self._token.encode(), purpose)
            while not self._closing.is_set():
                for ready, _ in selector.select(_LOOK_SECONDS):
                    caller = acceptor.ready(ready.fileobj)
                    if caller is not None:
                        threading.Thread(target=_answer, args=(caller,), daemon=True).start()
                acceptor.expire()
            acceptor.close()


def _purpose(address: str, port: int) -> str:
    return f"doctor's call to {address}:{port}"


def call(own: str, address: str, ports: list[int], token: str) -> Iterator[dict[str, Any]]:
    """Connect to each port of another node; measure on the last. Yields one result a port."""
    for port in ports:
        try:
            line = socket.create_connection((address, port), CONNECT_SECONDS, source_address=(own, 0))
        except OSError as error:
            yield {"port": port, "reason": error.strerror or str(error)}
            continue
        with line:
            line.settimeout(_ANSWER_SECONDS)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if port != ports[-1]:
                continue
            try:
                prove(line, token.encode(), _purpose(address, port))
                line.settimeout(_ANSWER_SECONDS)
                yield {"port": port, "seconds": _round_trip(line), "bytes_per_second": _flood(line)}
            except OSError as error:
                yield {"port": port, "reason": error.strerror or str(error)}
            except NotAuthenticated as error:
                yield {"port": port, "reason": f"another program listens there ({error})"}


def _round_trip(line: socket.socket) -> float:
    spent = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        line.sendall(_PING)
        if line.recv(1) != _PING:
            raise ConnectionError("the other end hung up")
        spent.append(time.perf_counter() - began)
    return statistics.median(spent)


def _flood(line: socket.socket) -> float:
    """Send for a moment; the other end says how much came through."""
    chunk = memoryview(bytes(_CHUNK))
    line.sendall(_FLOOD)
    began = time.perf_counter()
    while time.perf_counter() - began < _SEND_SECONDS:
        line.sendall(chunk)
    line.shutdown(socket.SHUT_WR)
    came = line.recv(32)
    if not came:
        raise ConnectionError("the other end hung up")
    return int(came) / (time.perf_counter() - began)


def _answer(caller: socket.socket) -> None:
    with caller, contextlib.suppress(OSError, ValueError):
        caller.settimeout(_ANSWER_SECONDS)
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while (word := caller.recv(1)) == _PING:
            caller.sendall(_PING)
        if word == _FLOOD:
            buffer, total = bytearray(_CHUNK), 0
            while count := caller.recv_into(buffer):
                total += count
            caller.sendall(str(total).encode())
