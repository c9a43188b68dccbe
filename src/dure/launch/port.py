"""A port of this host, taken before anything starts."""

from __future__ import annotations

import socket

from dure.base.errors import UsageError


def listen_at(address: str, port: int, way_out: str) -> socket.socket:
    """Bind a port (0: a free one) now, so that one in use is told at once; `way_out` says what to do then."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"port {port} on {address} cannot be used: {reason}. {way_out}") from None
    return listener
