"""Run one function on every rank of a team, and bring home what they return."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dure.base import open_files
from dure.base.errors import UsageError
from dure.base.files import open_own
from dure.base.run_folder import RunFolder
from dure.comm.topology import RUN_VARIABLE
from dure.config.limits import MOST_RANKS
from dure.launch import process_tree
from dure.launch.agent import Agent
from dure.launch.agent_link import AgentLink, Alone, LeaderLink
from dure.launch.port import listen_at
from dure.launch.preload import TORCH
from dure.launch.rank import Call, Command, Script
from dure.launch.ranks import Ranks
from dure.launch.restart_policy import Restart, RestartPolicy
from dure.launch.spec import LaunchSpec
from dure.launch.state_memory import StateMemory
from dure.launch.stop import StopSignals


def run_team(
    entry: str,
    args: tuple[object, ...],
    spec: LaunchSpec | None = None,
    *,
    threads: int = 1,
    preload: Sequence[str] = TORCH,
    **fields: Any,
) -> list[object]:
    """Call `entry` (`package.module:function`) with `args` on every rank; return their values in rank order.

    The launch is described by `spec`, or by its fields as keywords. Ranks find torchrun's environment variables and
    `threads` threads. `preload` and the module of `entry` are imported once, before the ranks are forked.

    A team whose machine failed it (a rank was killed, crashed, ran out of memory or hung; see `may_pass`) is
    ended and started again, as far as `spec.max_restarts` allows. Ranks find the number of restarts in
    TORCHELASTIC_RESTART_COUNT. Ranks that have been asked to stop, by a signal or by the file `folder.stop`, are not
    started again when they fail, and are ended after `spec.stop_seconds`; both raise Resumable. A second signal stops
    at once (but for SIGHUP: a closed terminal may send two).

    With `spec.joined` the values are those of this node's ranks; the leader has all of them (`Joined.values`).

    Raises RankFailed with the first cause, StoppedAtOnce after Ctrl-C or SIGTERM, UsageError for a port in
    use; no process is left then. Call it from the main thread.
    """
    spec = LaunchSpec(**fields) if spec is None else replace(spec, **fields)
    search_path = tuple(os.path.abspath(entry) for entry in sys.path)
    env = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        # The order of a set of words depends on it: it must be the same on all nodes, and at every start.
        "PYTHONHASHSEED": "0",
        # Its heartbeat file; a rank that writes elsewhere would be taken for hung.
        RUN_VARIABLE: str(spec.folder.path.absolute()),
    }
    call = Call(entry, pickle.dumps(args), threads, spec.folder, search_path)
    return launch(spec, call, env, preload=(*preload, entry.partition(":")[0]), search_path=search_path)


def launch(
    spec: LaunchSpec,
    work: Call | Script | Command,
    env: Mapping[str, str],
    *,
    preload: Sequence[str],
    extra: Sequence[str] = (),
    search_path: Sequence[str] | None = None,
) -> list[object]:
    """Run `work` on every rank: start a prefork server, run the agent, leave nothing behind.

    The prefork server imports `preload`, and `extra` where that starts no threads, from `search_path` (None: as a fresh
    interpreter does). Raises as `run_team` does.
    """
    _prepare(spec)
    ask = None if spec.ask_to_stop is None else lambda name: _ask(spec, name, processes)
    lease = spec.joined.lease if spec.joined is not None else None
    with (
        StopSignals(ask, lease, lambda: spec.stops_at_a_step) as stop,
        listen(spec.port) as listener,
        StateMemory() as memory,
    ):
        env = _environment(spec, env, memory)
        processes: Ranks = _prefork(spec, work, env, preload, extra, search_path)
        try:
            return Agent(spec, work, env, _link(spec, listener, stop), processes, stop).run()
        finally:
            processes.end(spec.grace_seconds)
            processes.close()
            _remove_empty(spec.folder.stacks(rank) for rank in processes.numbers)


def _prepare(spec: LaunchSpec) -> None:
    """Refuse what cannot be launched, and make the run's folder ready."""
    if not 1 <= spec.ranks <= MOST_RANKS:
        raise UsageError(f"{spec.ranks} ranks cannot be started; use 1 to {MOST_RANKS}.")
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("ranks must be started from the main thread, or they would end with the other one")
    nodes = spec.joined.nodes if spec.joined is not None else 1
    open_files.allow(open_files.needed(spec.ranks * nodes, spec.ranks, nodes))
    _create(spec.folder)
    if spec.joined is None:
        forget_last_run(spec.folder, spec.ranks)


def _environment(spec: LaunchSpec, env: Mapping[str, str], memory: StateMemory) -> dict[str, str]:
    """What the prefork server and all ranks find in their environment."""
    asked = {name: value for name, value in spec.environment.items() if value is not None}
    return {
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        **{name: value for name, value in env.items() if name not in spec.environment},
        **asked,
        **(memory.environment if spec.max_restarts or spec.script is not None else {}),
        **(spec.joined.environment if spec.joined is not None else {}),
    }


def _link(spec: LaunchSpec, listener: socket.socket, stop: StopSignals) -> AgentLink:
    """Who decides about the team: this node, or the leader of several."""

    def check() -> None:
        stop.check()
        spec.on_tick()

    def stopping() -> bool:
        return spec.stops_at_a_step and (stop.asked_at is not None or spec.folder.asked_to_stop())

    def restarted(restart: Restart) -> None:
        record_restart(spec.folder, restart)
        spec.on_restart(restart)

    if spec.joined is not None:
        return LeaderLink(spec.joined.member, check, spec.on_team, spec.to_json)
    policy = RestartPolicy(spec.max_restarts, spec.ranks, spec.min_ranks, spec.script)
    return Alone(listener, policy, restarted, stopping)


def _prefork(
    spec: LaunchSpec,
    work: Call | Script | Command,
    env: Mapping[str, str],
    preload: Sequence[str],
    extra: Sequence[str],
    search_path: Sequence[str] | None,
) -> Ranks:
    try:
        return Ranks(
            [spec.folder.log(rank) for rank in range(spec.ranks)],
            preload=preload,
            extra=extra,
            stock=not isinstance(work, Call),
            env=env,
            search_path=search_path,
            tee=spec.tee,
            on_said=spec.on_said,
        )
    except OSError as error:
        raise UsageError(
            f"{spec.ranks} ranks cannot be started: {error.strerror}; use fewer, or raise what `ulimit -n` and `ulimit "
            "-u` allow"
        ) from None


def _create(folder: RunFolder) -> None:
    try:
        folder.create()
    except OSError as error:
        raise UsageError(
            f"cannot make the run folder {folder.path}: {error.strerror}; give another --run-dir"
        ) from None


def _ask(spec: LaunchSpec, signal_name: str, ranks: Ranks) -> None:
    """Ask the ranks to stop; by a signal, which they take for the same, where the run's disk refuses."""
    assert spec.ask_to_stop is not None
    try:
        spec.ask_to_stop(signal_name)
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
    folder.script.unlink(missing_ok=True)
    for rank in range(ranks):
        for path in (folder.error(rank), folder.stacks(rank), folder.heartbeat(rank)):
            path.unlink(missing_ok=True)


def _remove_empty(paths: Iterable[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            if path.stat().st_size == 0:
                path.unlink()
