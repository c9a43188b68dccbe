"""Ports for servers that live as long as a test or a measurement."""

from __future__ import annotations

import random
import socket


def free_ports(count: int) -> list[int]:
    """Ports that are free now, on all addresses.

    They lie below the range from which the kernel serves port 0 and outgoing connections, so that nobody
    takes one by chance between this look and the server's start.
    """
    free: list[int] = []
    for port in random.Random().sample(range(30000, 32768), 200):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        free.append(port)
        if len(free) == count:
            return free
    raise OSError(f"fewer than {count} of 200 ports from 30000 to 32767 are free")
