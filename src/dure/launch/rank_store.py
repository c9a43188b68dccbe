"""The TCP store in which a team's ranks meet: a process of its own, forked by the prefork server, which has torch."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import select
import signal
import socket
import sys
import traceback
from typing import NoReturn

from dure.launch import process_tree

_STORE_SECONDS = 30.0


def store_listener(address: str) -> socket.socket:
    """A free port of `address` for a team's store. Ranks can connect from now on: they are served a little later."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=2048)


def serve_store(listener: int, server_pid: int, *, on_demand: bool) -> NoReturn:
    """Serve a new store at a listening socket until this process is killed. Runs in a fork of the prefork server.

    Each team gets its own, without anything that a dead one left. Where torch has to be imported for it, `on_demand`
    waits for the first rank that connects: others may never need it.
    """
    # What it could not start for goes to the launcher's stderr; later, c10d's warnings about clients without a name in
    # the DNS are nothing to warn of.
    errors = -1
    try:
        process_tree.die_with(server_pid)
        with contextlib.suppress(OSError):
            errors = os.dup(2)
        # Where standard streams were never open, it may have the number of one.
        listener = fcntl.fcntl(listener, fcntl.F_DUPFD_CLOEXEC, 3)
        _close_all_but(listener, errors)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nothing, descriptor)
        if on_demand and "torch" not in sys.modules:
            select.select([listener], [], [])
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        with socket.socket(fileno=os.dup(listener)) as bound:
            address, port = bound.getsockname()[:2]
        store = TCPStore(
            address,
            port,
            world_size=1,
            is_master=True,
            timeout=datetime.timedelta(seconds=_STORE_SECONDS),
            multi_tenant=True,
            master_listen_fd=listener,
        )
        while store is not None:
            signal.pause()
    except BaseException:
        with contextlib.suppress(OSError):
            os.write(errors, traceback.format_exc().encode(errors="replace"))
    finally:
        os._exit(1)


def _close_all_but(*kept: int) -> None:
    """The ranks' pipes belong to the ranks alone: a reader must see their end."""
    first = 3
    for descriptor in sorted(fd for fd in kept if fd >= first):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))
