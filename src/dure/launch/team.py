"""Run one function on every rank of a team, and bring home what they return."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dure.base import open_files
from dure.base.errors import UsageError
from dure.base.files import open_own
from dure.base.run_folder import RunFolder
from dure.base.say import say
from dure.config.limits import MOST_RANKS
from dure.launch import process_tree
from dure.launch.agent import Agent, Plan
from dure.launch.agent_link import AgentLink, Alone, LeaderLink
from dure.launch.hang import HangWatch
from dure.launch.port import listen_at
from dure.launch.preload import TORCH_WITH_DDP
from dure.launch.rank import Call, Command, RankStart, Script
from dure.launch.rank_store import import_torch
from dure.launch.ranks import Ranks
from dure.launch.restart_policy import Restart, RestartPolicy
from dure.launch.state_memory import StateMemory
from dure.launch.stop import StopSignals

if TYPE_CHECKING:
    from dure.launch.nodes.join import Joined
    from dure.launch.nodes.messages import Team


def run_team(
    entry: str,
    args: tuple[object, ...],
    *,
    ranks: int,
    folder: RunFolder,
    threads: int = 1,
    hang_seconds: float,
    port: int = 0,
    on_tick: Callable[[], None] | None = None,
    tee: bool = False,
    preload: Sequence[str] = TORCH_WITH_DDP,
    grace_seconds: float = 1.0,
    max_restarts: int = 0,
    min_ranks: int | None = None,
    on_restart: Callable[[Restart], None] | None = None,
    ask_to_stop: Callable[[str], None] | None = None,
    stop_seconds: float = math.inf,
    joined: Joined | None = None,
    on_team: Callable[[Team], None] = lambda team: None,
    to_json: Callable[[object], Any] = lambda value: value,
    on_said: Callable[[str], None] = say,
) -> list[object]:
    """Call `entry` (`package.module:function`) with `args` on every rank; return their values in rank order.

    Ranks find torchrun's environment variables, `threads` threads, and their output in `folder.log(rank)`
    (and on the console with `tee`). `preload` and the module of `entry` are imported once, before the ranks
    are forked. `on_tick` is called about ten times a second. When no rank's heartbeat moves for `hang_seconds`,
    all stacks are collected and the run is ended; `math.inf` never ends it. `ask_to_stop` is called with the name of
    the first Ctrl-C, SIGTERM, SIGHUP or SIGUSR1, for ranks that can stop at a step and save; a second one stops at
    once (but for SIGHUP: a closed terminal may send two). Ranks that have been asked, so or by the file `folder.stop`,
    are not started again when they fail, and are ended after `stop_seconds`; both raise Resumable. Where
    `ask_to_stop` raises OSError, the ranks are told by SIGUSR1.

    A team whose machine failed it (a rank was killed, crashed, ran out of memory or hung; see `may_pass`) is
    ended and started again, up to `max_restarts` times without getting to a further step; `on_restart` is
    told. Then, with `min_ranks`, it goes on with one rank less, and so on down to so many. The ranks find the number of
    restarts in TORCHELASTIC_RESTART_COUNT.

    With `joined`, these are one node's ranks of a team of several nodes: the leader decides about restarts,
    `on_team` is told of each team, and the values are those of this node's ranks; `to_json` makes them fit for
    the way to the leader, which has all of them (`Joined.values`).

    `on_said` is told what a rank has to say at once, when its log or its events cannot be written.

    Raises RankFailed with the first cause, StoppedAtOnce after Ctrl-C or SIGTERM, UsageError for a port in
    use; no process is left then. Call it from the main thread.
    """
    packed = pickle.dumps(args)
    search_path = tuple(os.path.abspath(entry) for entry in sys.path)

    def work(rank: int) -> Call:
        return Call(entry, packed, threads, folder, search_path)

    module = entry.partition(":")[0]
    return launch(
        work,
        ranks=ranks,
        folder=folder,
        env={
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            # The order of a set of words depends on it: it must be the same on all nodes, and at every start.
            "PYTHONHASHSEED": "0",
            # Its heartbeat file; a rank that writes elsewhere would be taken for hung.
            "DURE_RUN": str(folder.path.absolute()),
        },
        preload=(*preload, module),
        search_path=search_path,
        hang_seconds=hang_seconds,
        port=port,
        on_tick=on_tick,
        tee=tee,
        grace_seconds=grace_seconds,
        max_restarts=max_restarts,
        min_ranks=min_ranks,
        on_restart=on_restart,
        ask_to_stop=ask_to_stop,
        stop_seconds=stop_seconds,
        joined=joined,
        on_team=on_team,
        to_json=to_json,
        on_said=on_said,
    )


def launch(
    work: Callable[[int], Call | Script | Command],
    *,
    ranks: int,
    folder: RunFolder,
    env: Mapping[str, str],
    preload: Sequence[str],
    search_path: Sequence[str] | None,
    hang_seconds: float,
    port: int,
    on_tick: Callable[[], None] | None,
    tee: bool,
    grace_seconds: float,
    extra: Sequence[str] = (),
    max_restarts: int = 0,
    min_ranks: int | None = None,
    on_restart: Callable[[Restart], None] | None = None,
    ask_to_stop: Callable[[str], None] | None = None,
    stop_seconds: float = math.inf,
    joined: Joined | None = None,
    on_team: Callable[[Team], None] = lambda team: None,
    to_json: Callable[[object], Any] = lambda value: value,
    on_said: Callable[[str], None] = say,
) -> list[object]:
    """Start a prefork server, import torch beside it, hand its ranks to the agent, leave nothing behind."""
    if not 1 <= ranks <= MOST_RANKS:
        raise UsageError(f"{ranks} ranks cannot be started; use 1 to {MOST_RANKS}.")
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("ranks must be started from the main thread, or they would end with the other one")
    nodes = joined.nodes if joined is not None else 1
    open_files.allow(open_files.needed(ranks * nodes, ranks, nodes))
    _create(folder)
    if joined is None:
        forget_last_run(folder, ranks)
    ask = None if ask_to_stop is None else lambda name: _ask(ask_to_stop, name, processes)
    lease = joined.lease if joined is not None else None
    with StopSignals(ask, lease) as stop, listen(port) as listener, StateMemory() as keep:
        elastic = {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT"}
        env = {
            **elastic,
            **env,
            **(keep.environment if max_restarts else {}),
            **(joined.environment if joined is not None else {}),
        }
        logs = [folder.log(rank) for rank in range(ranks)]
        processes: Ranks = _ranks(logs, preload, extra, env, search_path, tee, on_said)

        def tell(restart: Restart) -> None:
            record_restart(folder, restart)
            if on_restart is not None:
                on_restart(restart)

        try:
            with stop.obeyed_at_once():
                import_torch()  # on one core, while the prefork server imports it on another

            def start(rank: int, rank_env: dict[str, str], again: bool) -> RankStart:
                elastic_error = folder.error(rank).with_suffix(".torchelastic.json")
                whole = {**env, **rank_env, "TORCHELASTIC_ERROR_FILE": str(elastic_error.absolute())}
                # Not resolved: a link in its place must be seen as one.
                return RankStart(rank, whole, os.getcwd(), folder.log(rank).absolute(), work(rank), again)

            kind = work(0)
            plan = Plan(
                folder,
                start,
                returns=isinstance(kind, Call),
                reports=not isinstance(kind, Command),
                grace_seconds=grace_seconds,
                on_tick=on_tick,
                max_restarts=max_restarts,
                stops_at_a_step=ask_to_stop is not None,
                stop_seconds=stop_seconds,
            )

            def wait() -> None:
                stop.check()
                if on_tick is not None:
                    on_tick()

            agent_link: AgentLink = (
                Alone(
                    listener,
                    RestartPolicy(max_restarts, ranks, min_ranks),
                    tell,
                    lambda: ask_to_stop is not None and (stop.asked_at is not None or folder.asked_to_stop()),
                )
                if joined is None
                else LeaderLink(joined.member, wait, on_team, to_json)
            )
            watch = HangWatch(processes, folder, hang_seconds) if math.isfinite(hang_seconds) else None
            return Agent(agent_link, plan, processes, stop, watch).run()
        finally:
            processes.end(grace_seconds)
            processes.close()
            _remove_empty(folder.stacks(rank) for rank in processes.numbers)


def _ranks(
    logs: Sequence[Path],
    preload: Sequence[str],
    extra: Sequence[str],
    env: Mapping[str, str],
    search_path: Sequence[str] | None,
    tee: bool,
    on_said: Callable[[str], None],
) -> Ranks:
    try:
        return Ranks(
            logs, preload=preload, extra=extra, env=env, search_path=search_path, tee=tee, on_said=on_said
        )
    except OSError as error:
        raise UsageError(
            f"{len(logs)} ranks cannot be started: {error.strerror}; use fewer, or raise what `ulimit -n` and `ulimit "
            "-u` allow"
        ) from None


def _create(folder: RunFolder) -> None:
    try:
        folder.create()
    except OSError as error:
        raise UsageError(
            f"cannot make the run folder {folder.path}: {error.strerror}; give another --run-dir"
        ) from None


def _ask(ask_to_stop: Callable[[str], None], signal_name: str, ranks: Ranks) -> None:
    """Ask the ranks to stop; by a signal, which they take for the same, where the run's disk refuses."""
    try:
        ask_to_stop(signal_name)
    except OSError:
        for rank in ranks.alive():
            ranks.send(rank, signal.SIGUSR1)


def listen(port: int) -> socket.socket:
    """The team's port on this host."""
    return listen_at("127.0.0.1", port, "Choose another port, or leave it out to get a free one.")


def record_restart(folder: RunFolder, restart: Restart) -> None:
    """Write down that the team starts again; a full disk is no reason not to."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    with contextlib.suppress(OSError), open(open_own(folder.restarts, flags), "a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(restart)) + "\n")


def forget_last_run(folder: RunFolder, ranks: int) -> None:
    """Remove what an earlier run in the same folder said about its ranks, and what was asked of it."""
    with contextlib.suppress(FileNotFoundError):
        if (
            folder.stop.lstat().st_mtime < process_tree.began_at()
        ):  # a request that came since is for this run
            folder.stop.unlink()
    folder.restarts.unlink(missing_ok=True)
    for rank in range(ranks):
        for path in (folder.error(rank), folder.stacks(rank), folder.heartbeat(rank)):
            path.unlink(missing_ok=True)


def _remove_empty(paths: Iterable[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            if path.stat().st_size == 0:
                path.unlink()
