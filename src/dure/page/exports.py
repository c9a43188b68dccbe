"""A run for other programs: CSV, Chrome/Perfetto trace, TensorBoard's event file, Prometheus text."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np

from dure.base.errors import UsageError
from dure.page.columns import AT, COLUMNS, PHASES
from dure.page.run import RunView

_MICROS = {"span", "wait", *PHASES}
_UNITS = {name: f"{name}_seconds" for name in _MICROS}
_BLOCK = 4096


def as_csv(view: RunView, first: int, end: int) -> Iterator[str]:
    """Every step of every rank, raw."""
    yield ",".join(["rank", "step", *(_UNITS.get(name, name) for name in COLUMNS)]) + "\n"
    scale = np.array([1e-6 if name in _MICROS else 1.0 for name in COLUMNS])
    for rank, feed in view.feeds().items():
        for begin in range(first, end, _BLOCK):
            for step, table in feed.pyramid.raw(begin, min(begin + _BLOCK, end)):
                rows = (table.astype(np.float64) * scale[:, None]).T
                yield "".join(
                    f"{rank},{step + at},{','.join('' if isnan(value) else f'{value:.7g}' for value in row)}\n"
                    for at, row in enumerate(rows.tolist())
                )


def as_trace(view: RunView, first: int, end: int) -> dict[str, Any]:
    """Phases of steps as Chrome's trace events, a process per node, a thread per rank. Ranks are aligned where the
    exchange ends, which is the same moment for all; clocks of ranks are not compared."""
    events: list[dict[str, Any]] = []
    nodes = {one["rank"]: node for node in view.state()["nodes"] for one in node["ranks"]}
    exchange_ends: dict[int, float] = {}
    for rank, feed in view.feeds().items():
        node = nodes.get(rank, {"node": 0, "host": "?"})
        events += [
            _named("process_name", node["node"], rank, f"node {node['node']} ({node['host']})"),
            _named("thread_name", node["node"], rank, f"rank {rank}"),
        ]
        clock = 0.0
        for begin, table in feed.pyramid.raw(first, end):
            known = np.nan_to_num(table, nan=0.0, posinf=0.0, neginf=0.0).astype(np.float64)
            for at in range(table.shape[1]):
                step, row = begin + at, known[:, at]
                clock += row[AT["span"]] or sum(row[AT[name]] for name in PHASES)
                met = exchange_ends.setdefault(step, clock - row[AT["update"]])
                start = met - sum(row[AT[name]] for name in PHASES[:-1])
                for name in PHASES:
                    if row[AT[name]]:
                        events.append(
                            {
                                "name": name,
                                "ph": "X",
                                "ts": round(start, 1),
                                "dur": round(row[AT[name]], 1),
                                "pid": node["node"],
                                "tid": rank,
                                "args": {"step": step, "wait_us": row[AT["wait"]]},
                            }
                        )
                    start += row[AT[name]]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, node: int, rank: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": node, "tid": rank, "args": {"name": name}}


def as_tensorboard(view: RunView, first: int, end: int) -> bytes:
    """An event file with every step's scalars of rank 0 and all evaluations; UsageError without tensorboard."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        raise UsageError(
            "TensorBoard's event files need its package: pip install 'dure[tensorboard]'"
        ) from None
    with tempfile.TemporaryDirectory(prefix="dure-page-") as folder:
        writer = EventFileWriter(folder)

        def add(step: int, values: dict[str, float]) -> None:
            told = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
            writer.add_event(Event(step=step, summary=Summary(value=told)))

        for rank, feed in view.feeds().items():
            for begin, table in feed.pyramid.raw(first, end):
                for at, row in enumerate(table.T.tolist()):
                    named = dict(zip(COLUMNS, row, strict=True))
                    known = {name: value for name, value in named.items() if not isnan(value)}
                    shared = {f"train/{name}": known[name] for name in _SHARED if name in known and rank == 0}
                    own = {f"rank {rank}/{name}": known[name] * 1e-6 for name in _MICROS if name in known}
                    add(begin + at, {**shared, **own})
            for one in feed.events.get("eval", ()) if rank == 0 else ():
                metrics = one.values.get("metrics", {})
                add(
                    one.values["step"],
                    {f"held out/{name}": v for name, v in metrics.items() if v is not None},
                )
        writer.close()
        (path,) = Path(folder).iterdir()
        return path.read_bytes()


_SHARED = ("loss", "lr", "norm")


def as_metrics(view: RunView) -> str:
    """Prometheus' text format: what the run is at now."""
    state = view.state()
    progress, run = state["progress"], json.dumps(state["id"], ensure_ascii=False)
    lines = []

    def gauge(name: str, words: str, values: list[tuple[str, Any]]) -> None:
        told = [(labels, value) for labels, value in values if isinstance(value, int | float)]
        if told:
            lines.append(f"# HELP dure_{name} {words}")
            lines.append(f"# TYPE dure_{name} gauge")
            lines.extend(f"dure_{name}{{run={run}{labels}}} {value}" for labels, value in told)

    ranks = [one for node in state["nodes"] for one in node["ranks"]]
    gauge("running", "Whether the run is under way.", [("", int(state["condition"] == "running"))])
    gauge("steps_done", "Steps that all ranks have done.", [("", progress.get("step"))])
    gauge("steps", "Steps of the whole run.", [("", progress.get("steps"))])
    gauge("loss", "Mean loss of the last step.", [("", progress.get("loss"))])
    gauge("samples_per_second", "Over the last 200 steps.", [("", progress.get("samples_per_second"))])
    gauge("seconds_left", "At the speed of the last 200 steps.", [("", progress.get("seconds_left"))])
    gauge("restarts", "How often the team was started again.", [("", len(state["restarts"]))])
    by_rank = [(f',rank="{one["rank"]}"', one) for one in ranks]
    gauge("rank_memory_bytes", "Resident memory.", [(label, one["memory"]) for label, one in by_rank])
    gauge("rank_step", "The last step of a rank.", [(label, one["step"]) for label, one in by_rank])
    gauge("rank_storage_requests", "Asked of storage.", [(label, one["requests"]) for label, one in by_rank])
    gauge("rank_storage_bytes", "Read of storage.", [(label, one["bytes"]) for label, one in by_rank])
    late = state["straggler"]
    gauge(
        "straggler_behind_seconds",
        "How long the others wait for this rank per step.",
        [(f',rank="{late["rank"]}"', late["behind_ms"] / 1e3)] if late else [],
    )
    return "\n".join(lines) + "\n"
