"""Joining a team: who this rank is, on which device, how its errors read."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
from types import TracebackType
from typing import Literal, get_args

import torch
from torch._C._distributed_c10d import Store

from dure.base.errors import DureError, Resumable, UsageError
from dure.base.open_files import allow, needed
from dure.base.portable import not_portable
from dure.base.say import say
from dure.comm.call_board import CallBoard
from dure.comm.group import join_world
from dure.comm.link_secret import read_link_secret
from dure.comm.reduce.factory import ExchangerFactory, Transport, WireName, wire_named
from dure.comm.topology import Topology, read_run_folder, read_topology
from dure.config.limits import LARGEST_SEED, MOST_SHARDS, MOST_THREADS
from dure.config.sections import DeviceName
from dure.data.seeds import seed_all
from dure.device.accelerator import CPU, Decision, Seen, decide, look, make_current
from dure.device.exactness import compute_exactly
from dure.device.host_memory import keep_freed_memory
from dure.device.portable import compute_portably, why_not_portable
from dure.observe.heartbeat import Heartbeat
from dure.proof import detectors
from dure.proof.arithmetic import agree_on_arithmetic
from dure.step.forward import Setting
from dure.step.replica import compile_by_shape_alone
from dure.step.shadow import OnCorruption
from dure.team.team import Team


def start(
    args: argparse.Namespace | None = None,
    *,
    seed: int = 0,
    shards: int = 8,
    threads: int = 1,
    arithmetic: Literal["native", "portable"] = "native",
    device: DeviceName = "auto",
    sync: bool = True,
    precision: Literal["fp32", "bf16"] = "fp32",
    wire: WireName = "fp32",
    transport: Transport = "auto",
    hang_seconds: float = 120.0,
    audit: float = 0.0,
    on_corruption: OnCorruption = "stop",
) -> Team:
    """Join the team that `dure run`, torchrun, srun or a person at the shell started; alone, a team of one.

    `args` may hold `rank`, `world_size` and `master` (see `dure.arguments`). The weights of a model that is
    built next come from `seed`, the same on every rank. With `arithmetic` portable the bits are the same on x86-64 CPUs
    of all kinds that have AVX2; the script must have been started for it: `dure run --arithmetic portable`.

    `audit` is the share of steps, 0 to 1, in which another rank computes one shard again and compares the gradients'
    bits. When a rank computed wrongly the step is repeated; then ComputedWrongly is raised on all ranks by the next
    `save_if_due`, step or end (`on_corruption="stop"`), or the script goes on (`"repeat"`).
    """
    given = {name: getattr(args, name, None) for name in ("rank", "world_size", "master")}
    _tell_errors_in_one_line()
    topology = read_topology(os.environ, **given)
    # All ranks stop together, and say the same: it is said once, by the launcher if that is ours.
    _tell_errors_in_one_line(says_resumable=topology.is_leader and topology.launcher != "dure")
    for name, value, least, most in (
        ("seed", seed, 0, LARGEST_SEED),
        ("shards", shards, 1, MOST_SHARDS),
        ("threads", threads, 1, MOST_THREADS),
    ):
        if not least <= value <= most:
            shown = value if abs(value) < 1 << 64 else "far too large"
            raise UsageError(f"{name} is {shown}; use {least} to {most}")
    _refuse_audit(audit, on_corruption, sync=sync)
    if topology.size > shards:
        raise UsageError(
            f"{topology.size} ranks need at least one shard each, but shards is {shards}; use fewer ranks"
        )
    if arithmetic == "portable":
        _compute_portably(precision)
    allow(needed(topology.size, topology.local_size, topology.nodes))
    torch.set_num_threads(threads)
    keep_freed_memory()
    compile_by_shape_alone()
    deadline_seconds = hang_seconds + 30.0  # the launcher's watch comes first: it sees all ranks
    store, chosen = _join(topology, deadline_seconds, device)
    if arithmetic == "portable" and (why := why_not_portable(chosen, precision)):
        raise UsageError(f'arithmetic = "portable" cannot be had: {why}')
    make_current(chosen)
    compute_exactly(chosen)
    setting = Setting(topology, shards, seed, sync, chosen, precision, deadline_seconds, audit, on_corruption)
    run = read_run_folder(os.environ)
    heartbeat = Heartbeat(run.heartbeat(topology.rank) if run is not None else None)
    calls = CallBoard(store, topology.rank, topology.size, heartbeat)
    exchangers = ExchangerFactory(
        topology,
        shards,
        chosen,
        wire_named(wire),
        transport,
        deadline_seconds=deadline_seconds,
        link_secret=read_link_secret(os.environ),
    )
    detectors.stop()
    team = Team(topology, setting, threads, heartbeat, calls, exchangers)
    team.agree(
        {
            "arithmetic": arithmetic,
            "seed": seed,
            "shards": shards,
            "threads": threads,
            "sync": sync,
            "precision": precision,
            "wire": wire,
            "audit": audit,
            "on_corruption": on_corruption,
        }
    )
    if sync and topology.size > 1:
        dtypes = [torch.get_default_dtype(), *([torch.bfloat16] if precision == "bf16" else [])]
        agree_on_arithmetic(team.group, chosen, dtypes)
    seed_all(seed)
    return team


def _refuse_audit(audit: float, on_corruption: str, *, sync: bool) -> None:
    if not 0.0 <= audit <= 1.0:
        raise UsageError(f"audit is {audit}; use 0 (no step) to 1 (every step)")
    if audit and not sync:
        raise UsageError("audit compares ranks that train one model, and sync is off; leave one of them out")
    known = get_args(OnCorruption)
    if on_corruption not in known:
        raise UsageError(f"on_corruption is {on_corruption!r}; use {', '.join(known)}")


def _join(topology: Topology, deadline_seconds: float, wanted: str) -> tuple[Store | None, torch.device]:
    """Agree with all ranks on a device for each, and make the process group for it."""
    own = look(wanted, socket.gethostname(), topology.node, topology.local_rank, topology.local_size)
    store, decided = join_world(
        topology,
        deadline_seconds,
        own.to_json(),
        lambda told: decide([Seen.from_json(one) for one in told]).to_json(),
        lambda decided: Decision.from_json(decided).device(topology.rank),
    )
    decision = Decision.from_json(decided)
    if decision.why and topology.is_leader:
        say(f"device is the CPU: {decision.why}")
    return store, decision.device(topology.rank)


def _compute_portably(precision: str) -> None:
    """Refuse what cannot be the same bits everywhere, and what it is too late for: torch is imported by now."""
    missing = not_portable(os.environ)
    if missing:
        raise UsageError(
            'arithmetic = "portable" needs variables that are read before torch is imported; start with `dure run '
            f"--arithmetic portable SCRIPT`, or set them outside: {' '.join(missing)}"
        )
    if why := why_not_portable(CPU, precision):
        raise UsageError(f'arithmetic = "portable" cannot be had: {why}')
    compute_portably()


class _OneLine:
    """An excepthook: an error of ours is its message; a traceback of every rank would bury it."""

    def __init__(self) -> None:
        self.says_resumable = True
        self._before = sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, DureError):
            self._before(kind, error, trace)
            return
        if not isinstance(error, Resumable):
            say(str(error))
            return
        if self.says_resumable:
            # torch's own hook around this one collects what is said, and loses it below.
            with contextlib.redirect_stderr(sys.__stderr__):
                say(str(error))
        raise SystemExit(error.exit_code)  # the interpreter ends with it, in order


def _tell_errors_in_one_line(*, says_resumable: bool = True) -> None:
    if not isinstance(sys.excepthook, _OneLine):
        sys.excepthook = _OneLine()
    sys.excepthook.says_resumable = says_resumable
