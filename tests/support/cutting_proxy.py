"""A way to a server that breaks: every connection is reset after so many bytes of answers, or carries 503s."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from types import TracebackType
from typing import Self

_RESET = struct.pack("ii", 1, 0)  # close with a reset instead of a goodbye
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class CuttingProxy:
    """Listens on loopback and passes on to `port`, within `with`."""

    def __init__(self, port: int) -> None:
        self.reset_after: int | None = None
        """Bytes of answers on one connection; None: never."""
        self.busy_answers = 0
        """So many connections are answered with 503."""
        self.swallow_answers = 0
        """So many connections are reset as soon as the server answers: it has done what it was asked to."""
        self.resets = 0
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._run(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Closing alone would not wake a thread that waits in accept.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for each in self._sockets:
            each.close()

    def _run(self, target, *args) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                with self._lock:
                    self._sockets.add(client)
                if self.busy_answers > 0:
                    self.busy_answers -= 1
                    client.recv(65536)
                    client.sendall(_BUSY)
                    client.shutdown(socket.SHUT_RDWR)
                    continue
                server = socket.create_connection(("127.0.0.1", self._port))
                with self._lock:
                    self._sockets.add(server)
                self._run(self._pass_on, client, server)
                self._run(self._answer, server, client)

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                server.sendall(data)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                if self.swallow_answers > 0:
                    self.swallow_answers -= 1
                    self._reset(client)
                    break
                client.sendall(data)
                passed += len(data)
                if self.reset_after is not None and passed > self.reset_after:
                    self._reset(client)
                    break
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)

    def _reset(self, client: socket.socket) -> None:
        self.resets += 1
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        with self._lock:
            self._sockets.discard(client)
        # The other thread's wait for questions would keep the connection open.
        client.shutdown(socket.SHUT_RD)
        client.close()
