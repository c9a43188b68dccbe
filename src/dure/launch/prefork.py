"""The prefork server: the process that ranks are forked from. It imports torch once, for all of them.

The launcher starts it as a fresh interpreter and talks to it over a socket. `multiprocessing`'s forkserver
does nearly this, but it leaves marks that a stock script under `dure run` would notice (a start method
already set, a parent process, the launcher's `__main__`, no stdin, `atexit` skipped) and it needs a
resource tracker, which is one more process that can outlive a killed launcher.

Nothing survives: the prefork server is killed with the launcher while it imports, later it sees the socket close
and kills every descendant (it adopts the orphans of dead ranks), and ranks are killed with the prefork server.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing.process
import os
import pickle
import select
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path

from dure.base import dynamo_on_demand
from dure.launch import process_tree
from dure.launch.rank_store import serve_store
from dure.launch.shm_cleanup import LOOK_SECONDS, ShmCleanup
from dure.launch.title import ROOM, set_title

FOR_THE_LAUNCHER = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip
"""Ctrl-C reaches everyone in the terminal, Slurm signals every process of a step: the launcher decides."""
_END_SECONDS = 5.0


@dataclass(frozen=True)
class RankRequest:
    """The launcher's request for one rank. `start` stays pickled: only the rank itself opens it."""

    rank: int
    start: bytes
    stdout: int | None
    """Where the rank's output goes (descriptors that the prefork server inherited); None: see `RankStart.log`."""
    stderr: int | None
    report: int
    """Where the rank says how it ended."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """All descriptors that belong to this rank; the prefork server keeps them for one that takes its place."""
        return tuple(fd for fd in (self.stdout, self.stderr, self.report) if fd is not None)


@dataclass(frozen=True)
class TeamRequest:
    """The launcher's request for a team."""

    ranks: list[RankRequest]
    store: bool
    """Whether a store is to be served too: the listening socket for it follows."""


@dataclass(frozen=True)
class StoreEnded:
    """The prefork server's word that the team's store has ended by itself."""

    exit_code: int
    at_ns: int


@dataclass(frozen=True)
class RankStarted:
    """The prefork server's word that a rank runs."""

    rank: int
    pid: int


@dataclass(frozen=True)
class Ended:
    """The prefork server's word that a rank has ended; `exit_code` is negative for a signal."""

    rank: int
    exit_code: int
    at_ns: int


def main(
    control: int,
    launcher: int,
    preload: tuple[str, ...],
    extra: tuple[str, ...],
    search_path: list[str] | None,
    stock: bool,
    sockets: str | None,
    fresh_path: list[str],
) -> int:
    """Import, then serve requests until the launcher is gone. Returns in every rank.

    `extra` is imported too, unless that starts threads, which no fork takes along. `stock`: whether ranks have a torch
    as any other interpreter has it; otherwise torch._dynamo comes on demand. `sockets` is where multiprocessing keeps
    its own. `fresh_path` is the `sys.path` of an interpreter that runs a script, but for the script's own folder. The
    launcher has blocked its signals for us.
    """
    server_pid = os.getpid()
    process_tree.die_with(launcher)
    for number in FOR_THE_LAUNCHER:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_THE_LAUNCHER)
    set_title(f"dure: prefork server of {launcher}", "dure prefork")
    env = dict(os.environ)
    if not stock:
        dynamo_on_demand.install()
    variables = _import(preload, extra)
    if variables is None:
        os.execve(
            sys.executable,
            command(control, launcher, preload, (), search_path, stock=stock, sockets=sockets),
            env,
        )
    if sockets is not None:
        multiprocessing.process.current_process()._config["tempdir"] = sockets  # type: ignore[attr-defined]
    process_tree.adopt_orphans()
    process_tree.outlive_parent()  # from here on the closed socket tells, and there is something to clear away
    with Connection(control) as launcher_line:
        request = _serve(launcher_line, stock, sockets) if os.getppid() == launcher else None
    if request is None:
        os._exit(0)  # no exit hook of a module that was imported here for others has anything to do
    from dure.launch.rank import live

    return live(request, server_pid, fresh_path, variables)


def _import(modules: tuple[str, ...], extra: tuple[str, ...]) -> dict[str, dict[str, str]] | None:
    """Import; returns the packages, each with the environment variables that its import has set.

    None when `extra` has made this process one that cannot be forked from.
    """
    gc.disable()
    variables: dict[str, dict[str, str]] = {}
    for name in modules:
        _import_one(name, variables)
    before = _threads()
    for name in extra:
        _import_one(name, variables)
    if _threads() > before:
        return None
    # Keeps the collector of every rank off these pages, so that they stay shared. What imports have left as garbage is
    # little, and looking for it takes longer than importing pydantic.
    gc.freeze()
    gc.enable()
    return variables


def _import_one(name: str, variables: dict[str, dict[str, str]]) -> None:
    module, _, attribute = name.partition(":")
    before = dict(os.environ)
    # What is missing or broken here fails again in the rank, which can say so.
    with contextlib.suppress(BaseException):
        imported = importlib.import_module(module)
        if attribute:
            getattr(imported, attribute)  # packages such as transformers import most of themselves only then
    changed = {key: value for key, value in os.environ.items() if before.get(key) != value}
    variables.setdefault(module.partition(".")[0], {}).update(changed)


def _threads() -> int:
    """All threads of this process that a fork would lose, native ones too: a driver that was woken up has some.

    Libraries that can be forked (OpenBLAS) end theirs before a fork, and start them again in whoever needs them.
    """
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return len(os.listdir("/proc/self/task"))


def _serve(launcher: Connection, stock: bool, sockets: str | None) -> RankRequest | None:
    """Fork ranks and report their ends. Returns a RankRequest in a new rank, None in the prefork server at the end."""
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write)
    ranks: dict[int, int] = {}
    shm_cleanup = ShmCleanup()
    teams, store = 0, 0
    while True:
        ready, _, _ = select.select([launcher.fileno(), wake_read], [], [], LOOK_SECONDS if ranks else None)
        shm_cleanup.look()
        if wake_read in ready:
            os.read(wake_read, 4096)
            _report_ends(launcher, ranks, store, shm_cleanup)
        if launcher.fileno() in ready:
            try:
                team: TeamRequest = pickle.loads(launcher.recv_bytes())
                listener = recv_handle(launcher) if team.store else None
            except (EOFError, OSError):
                _end_descendants(list(ranks), shm_cleanup)
                shm_cleanup.sweep()
                if sockets is not None:
                    shutil.rmtree(sockets, ignore_errors=True)
                return None
            if teams and not ranks:
                _end_descendants([], shm_cleanup)  # what the ranks of the team before left running
                shm_cleanup.sweep()
            teams += 1
            if listener is not None:
                store = _start_store(listener, store, on_demand=not stock)
            for request in team.ranks:
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for number in FOR_THE_LAUNCHER:
                        signal.signal(number, signal.SIG_DFL)
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    others = {fd for other in team.ranks if other is not request for fd in other.descriptors}
                    for fd in (wake_read, wake_write, *others):
                        os.close(fd)
                    return request
                ranks[pid] = request.rank
                _tell(launcher, RankStarted(request.rank, pid))


def _start_store(listener: int, before: int, *, on_demand: bool) -> int:
    """Serve a store in a process of its own, and end the one `before`; returns its process id."""
    if before:
        with contextlib.suppress(ProcessLookupError):
            os.kill(before, signal.SIGKILL)
    server_pid, launcher_pid = os.getpid(), os.getppid()
    pid = os.fork()
    if pid == 0:
        set_title(f"dure: store of {launcher_pid}", "dure store")
        serve_store(listener, server_pid, on_demand=on_demand)
    os.close(listener)
    return pid


def _report_ends(launcher: Connection, ranks: dict[int, int], store: int, shm_cleanup: ShmCleanup) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        shm_cleanup.saw(pid)
        rank = ranks.pop(pid, None)
        if rank is not None:  # otherwise an adopted orphan
            _tell(launcher, Ended(rank, os.waitstatus_to_exitcode(status), time.monotonic_ns()))
        elif pid == store:
            _tell(launcher, StoreEnded(os.waitstatus_to_exitcode(status), time.monotonic_ns()))


def _tell(launcher: Connection, message: RankStarted | Ended | StoreEnded) -> None:
    with contextlib.suppress(OSError):  # the launcher is gone; the next read of its socket says so
        launcher.send(message)


def _end_descendants(ranks: list[int], shm_cleanup: ShmCleanup) -> None:
    deadline = time.monotonic() + _END_SECONDS
    while time.monotonic() < deadline:
        for pid in {*process_tree.children(), *ranks}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                shm_cleanup.saw(pid)
                if pid in ranks:
                    ranks.remove(pid)
        except ChildProcessError:
            return
        time.sleep(0.002)


def command(
    control: int,
    launcher: int,
    preload: tuple[str, ...],
    extra: tuple[str, ...],
    search_path: list[str] | None,
    *,
    stock: bool,
    sockets: str | None,
) -> list[str]:
    """Return the command line of a prefork server that imports from `search_path` (None: as a fresh interpreter)."""
    source = str(Path(__file__).parents[2])  # `dure` itself is found where the launcher found it
    code = (
        "import sys; fresh = sys.path[0 if sys.flags.safe_path else 1 :]\n"
        f"sys.path[:] = {search_path!r} or [*fresh, {source!r}]\n"
        "from dure.launch.prefork import main\n"
        f"sys.exit(main({control}, {launcher}, {preload!r}, {extra!r}, {search_path!r}, {stock!r}, {sockets!r}, fresh))"
    )
    # -u as torchrun starts its ranks: what a rank prints is out at once, and a kill loses none of it.
    return [sys.executable, "-u", "-c", code, " " * ROOM]
