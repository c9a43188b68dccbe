"""The TCP store of the ranks' rendezvous: the one thing for which the launcher needs torch."""

from __future__ import annotations

import datetime
import gc
import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

_STORE_SECONDS = 30.0


def import_torch() -> None:
    """Import what `open_rank_store` needs; takes seconds, which the prefork server uses to do the same."""
    # Not for the ranks, whose environment is made already: a store whose clients have no names is nothing to warn of.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    collecting = gc.isenabled()
    gc.disable()  # an import only makes objects that stay
    try:
        import torch.distributed  # noqa: F401
    finally:
        if collecting:
            gc.enable()


def open_rank_store(address: str, listener: socket.socket | None) -> tuple[TCPStore, int]:
    """Serve a new store, and return it with its port. Each team gets its own, without anything a dead one left.

    It takes over `listener`, or listens at a free port of `address`. It is served until it is no longer referenced.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if listener is None:
        listener = socket.create_server((address, 0), backlog=2048)
    port = listener.getsockname()[1]
    store = TCPStore(
        address,
        port,
        world_size=1,
        is_master=True,
        timeout=datetime.timedelta(seconds=_STORE_SECONDS),
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )
    return store, port
