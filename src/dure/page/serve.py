"""The page's process: its address, its token, the browser."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import secrets
import shlex
import signal
import socket
import sys
import webbrowser
from dataclasses import dataclass
from getpass import getuser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dure.base.errors import UsageError
from dure.base.say import say

if TYPE_CHECKING:
    from dure.page.catalog import Catalog

PORT = 8642
_LAST_PORT = 65535


@dataclass(frozen=True)
class Address:
    """Where the page is served."""

    host: str
    port: int
    token: str | None
    """Whoever can reach the address needs it; None on the loopback, which is this machine's alone."""

    @property
    def url(self) -> str:
        """For a browser on this machine."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        query = "" if self.token is None else f"?token={self.token}"
        return f"http://{host}:{self.port}/{query}"

    @property
    def tunnel(self) -> str | None:
        """Over ssh, the command that brings the page to the machine one sits at."""
        connection = os.environ.get("SSH_CONNECTION", "").split()
        if len(connection) != 4:
            return None
        there = shlex.quote(f"{getuser()}@{connection[2]}")
        port = "" if connection[3] == "22" else f"-p {connection[3]} "
        return f"ssh {port}-N -L {self.port}:{self.host}:{self.port} {there}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int | None) -> tuple[socket.socket, Address]:
    """Listen; on `port`, or else on the usual one, or a free one when that is taken. UsageError when it cannot be."""
    wanted = [PORT, 0] if port is None else [port]
    if not 0 <= wanted[0] <= _LAST_PORT:  # the resolver would take it for another one
        raise UsageError(f"--port {port}: ports are 0 to {_LAST_PORT}; choose another --host or --port")
    for number in wanted:
        try:
            kind, _, _, _, address = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(kind, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(address)
                listener.listen(64)
            except BaseException:
                listener.close()
                raise
            token = None if is_loopback(host) else secrets.token_urlsafe(24)
            return listener, Address(host, listener.getsockname()[1], token)
        except (OSError, OverflowError) as error:
            if number == wanted[-1]:
                reason = error.strerror if isinstance(error, OSError) else error
                raise UsageError(
                    f"cannot listen on {host} port {number}: {reason}; choose another --host or --port"
                ) from None
    raise AssertionError("no port was tried")


def serve(listener: socket.socket, address: Address, catalog: Catalog) -> None:
    """Answer until the process is asked to end."""
    from dure.page.server import application

    with contextlib.closing(catalog):
        run_server(listener, application(catalog, address.host, address.token))


def run_server(listener: socket.socket, application: Any) -> None:
    """Serve an ASGI application on a socket until the process is asked to end."""
    uvicorn = _uvicorn()
    config = uvicorn.Config(
        application,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        http="h11",
        server_header=False,
        timeout_graceful_shutdown=2,
    )
    # uvicorn stops at these signals and then sends them again, to whom they were meant for.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        listener.close()


def refuse_without_extra() -> None:
    """UsageError that names the extra, before anything else is done."""
    _uvicorn()


def _uvicorn() -> Any:
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError:
        raise UsageError("the page needs starlette and uvicorn: pip install 'dure[page]'") from None
    return uvicorn


def open_browser(address: Address) -> None:
    """Show the page, where there is a screen; over ssh there is none."""
    has_screen = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if has_screen and "SSH_CONNECTION" not in os.environ:
        with contextlib.suppress(webbrowser.Error, OSError):
            webbrowser.open(address.url)


def end_with(parent: int) -> None:
    """Have the kernel end this process with the one that started it, whatever happens to that one."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(0)


def give_way() -> None:
    """Have this process take the processor only where ranks leave some: it never interrupts one that runs."""
    os.nice(10)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def show(
    wanted: Path | None,
    host: str,
    port: int | None,
    *,
    opens: bool,
    as_json: bool,
    parent: int | None = None,
) -> None:
    """`dure page`: find the run, say where the page is, serve it."""
    import json

    from dure.page.catalog import Catalog

    refuse_without_extra()
    give_way()
    if parent is not None:
        end_with(parent)
    catalog = Catalog.of(wanted)
    listener, address = bind(host, port)
    if as_json:
        told = {"url": address.url, "port": address.port, "pid": os.getpid(), "run": catalog.newest}
        print(json.dumps({**told, "tunnel": address.tunnel}), flush=True)
    else:
        if parent is None:
            print(f"{catalog.newest}: {address.url}", flush=True)  # with its token, which `say` would hide
            say("Ctrl-C ends it")
        else:
            say(f"the page: {address.url}")
        if address.tunnel is not None:
            say(f"from your own machine: {address.tunnel}")
    if opens:
        open_browser(address)
    serve(listener, address, catalog)
