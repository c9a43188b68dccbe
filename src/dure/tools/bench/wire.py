"""What the link between two nodes can carry: plain TCP, one connection a local rank, both ways at once."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import torch

from dure.base.errors import DureError
from dure.team import Team

_DEADLINE_SECONDS = 120.0


class Wire:
    """This rank's own connection to the rank of the same local number on the other node."""

    def __init__(self, team: Team) -> None:
        """Connect; a collective call of two nodes with the same number of ranks."""
        topology = team.topology
        self._peer = topology.rank + topology.local_size * (1 if topology.node == 0 else -1)
        self._connection = self._accept(team) if topology.node == 0 else self._connect(team)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sender = ThreadPoolExecutor(1, "wire")

    def transfer(self, send: torch.Tensor, receive: torch.Tensor) -> None:
        """Send all bytes of one tensor and fill the other (flat, uint8), at the same time."""
        try:
            sent = self._sender.submit(self._connection.sendall, send.numpy().data)
            view = receive.numpy().data
            while view:
                count = self._connection.recv_into(view)
                if count == 0:
                    raise ConnectionResetError("connection closed by peer")
                view = view[count:]
            sent.result(_DEADLINE_SECONDS)
        except TimeoutError:
            raise DureError(
                f"the plain transfer with rank {self._peer} stood still for {_DEADLINE_SECONDS:.0f} s"
            ) from None

    def _accept(self, team: Team) -> socket.socket:
        with socket.create_server((team.topology.leader_host, 0)) as listener:
            team.group.gather(json.dumps(listener.getsockname()), "laying the plain wire")
            listener.settimeout(_DEADLINE_SECONDS)
            connection = listener.accept()[0]
        connection.settimeout(_DEADLINE_SECONDS)
        return connection

    def _connect(self, team: Team) -> socket.socket:
        addresses = team.group.gather("", "laying the plain wire")
        host, port = json.loads(addresses[self._peer])
        return socket.create_connection((host, port), _DEADLINE_SECONDS)

    def close(self) -> None:
        """Hang up."""
        self._connection.close()
        self._sender.shutdown()

    def __enter__(self) -> Wire:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
