"""`dure bench reduce`: one all-reduce of a bucket, against Gloo, OpenMPI, a plain copy and the plain wire.

All contenders live in the same ranks (OpenMPI's beside them) and take turns. A round's figure is its slowest
rank's; the figures are medians over rounds.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dure.base.errors import UsageError
from dure.base.run_folder import RunFolder
from dure.launch import run_team
from dure.launch.preload import TORCH
from dure.tools.bench import openmpi
from dure.tools.bench.two_nodes import TwoNodes
from dure.tools.lab.network import bits_per_second

SIZES = (1 / 1024, 4 / 1024, 16 / 1024, 64 / 1024, 256 / 1024, 1.0, 25.0, 100.0)
OPENMPI_BAR, LARGEST_WITH_BAR = 1.0, 1.0
"""Up to so many MiB: at most so many times what OpenMPI takes, which is the quickest with little."""
HANG_SECONDS = 120.0
CONTENDERS = ("dure", "gloo", "openmpi", "memcpy", "wire_limit")
WIRES = ("fp32", "bf16")

Figures = dict[str, Any]


@dataclass(frozen=True)
class RankFigures:
    """What one rank measured, by contender and size in MiB: a figure a round."""

    exchanger: str
    """The way that the team chose."""
    seconds: dict[str, dict[float, list[float]]]
    """Of one all-reduce (one copy, one transfer)."""
    sent: dict[str, dict[float, list[float]]]
    """Bytes that this rank's node put on the link for it; counted by the first rank of each node."""


def bench_reduce(
    *,
    ranks: int = 4,
    nodes: int = 1,
    rate: str | None = None,
    mib: Sequence[float] = SIZES,
    rounds: int = 7,
    wire: str = "fp32",
) -> Figures:
    """Milliseconds of one all-reduce over `ranks` ranks on each of one or two nodes.

    Two nodes are joined by a link of `rate` each way, and send each other numbers as `wire`.
    """
    _check(ranks, nodes, rate, mib, rounds, wire)
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as beside:
        folder = RunFolder(Path(temporary) / "run")
        entry = "dure.tools.bench.reduce_ranks:measure"
        results: list[object]
        if nodes == 1:
            has_openmpi = openmpi.is_installed()
            if has_openmpi:
                beside.enter_context(openmpi.beside(Path(temporary), ranks))
            args = (list(mib), rounds, wire, temporary if has_openmpi else None)
            results = run_team(
                entry, args, ranks=ranks, folder=folder, hang_seconds=HANG_SECONDS, preload=TORCH
            )
        else:
            pair = beside.enter_context(TwoNodes(rate))
            results = pair.run_ranks(
                entry,
                (list(mib), rounds, wire, None),
                ranks_per_node=ranks,
                folder=folder,
                deadline_seconds=_deadline(rate, mib, rounds),
            )
    found = cast(list[RankFigures], results)
    return {
        "ranks": ranks,
        "nodes": nodes,
        "rate": rate,
        "wire": wire,
        "rounds": rounds,
        "exchanger": found[0].exchanger,
        "results": [_row(found, size, nodes, ranks) for size in mib],
    }


def in_words(figures: Figures) -> str:
    """A table, with what each peer takes in multiples of dure's time."""
    where = f"{figures['ranks']} ranks"
    if figures["nodes"] == 2:
        where = f"2 nodes × {where}, {figures['rate'] or 'an unshaped link'}, {figures['wire']} between them"
    peers = {"gloo": "Gloo", "openmpi": "OpenMPI", "memcpy": "one copy", "wire_limit": "plain TCP"}
    shown = {name: title for name, title in peers.items() if name in _there(figures)}
    lines = [
        f"One all-reduce, {where}: medians of {figures['rounds']} interleaved rounds ({figures['exchanger']}).",
        f"{'':>8} {'dure':>11} " + " ".join(f"{title:>19}" for title in shown.values()),
    ]
    for row in figures["results"]:
        cells = [
            f"{row[f'{name}_ms']:>8.3f} ms {row[f'{name}_ms'] / row['dure_ms']:>5.1f} ×" for name in shown
        ]
        line = f"{_size(row['mib']):>8} {row['dure_ms']:>8.3f} ms " + " ".join(cells)
        if row["of_openmpi"] is not None and row["bar"] is not None:
            line += f"   {row['of_openmpi']:.2f} of OpenMPI (bar: ≤ {row['bar']:g})"
        lines.append(line)
    if figures["nodes"] == 2:
        lines.append("MiB on the link for one all-reduce, there and back:")
        for row in figures["results"]:
            sent = [
                f"{name} {row['bytes_a_to_b'][name] / 2**20:.2f} + {row['bytes_b_to_a'][name] / 2**20:.2f}"
                for name in ("dure", "gloo")
            ]
            lines.append(f"{_size(row['mib']):>8}   " + "   ".join(sent))
    elif "openmpi" not in shown:
        lines.append("OpenMPI is not installed: apt-get install openmpi-bin python3-mpi4py to have it here.")
    return "\n".join(lines)


def _size(mib: float) -> str:
    return f"{mib:g} MiB" if mib >= 1 else f"{mib * 1024:g} KiB"


def _there(figures: Figures) -> set[str]:
    return {name for name in CONTENDERS for row in figures["results"] if row[f"{name}_ms"] is not None}


def _row(found: list[RankFigures], size: float, nodes: int, ranks: int) -> Figures:
    row: Figures = {"mib": size} | {f"{name}_ms": _median_ms(found, name, size) for name in CONTENDERS}
    theirs = row["openmpi_ms"]
    row["of_openmpi"] = round(row["dure_ms"] / theirs, 3) if theirs else None
    row["bar"] = OPENMPI_BAR if size <= LARGEST_WITH_BAR and nodes == 1 else None
    for way, first_rank in {"bytes_a_to_b": 0, "bytes_b_to_a": ranks}.items():
        row[way] = None
        if nodes == 2:
            sent = found[first_rank].sent
            row[way] = {name: round(statistics.median(sent[name][size])) for name in ("dure", "gloo")}
    return row


def _median_ms(found: list[RankFigures], name: str, size: float) -> float | None:
    """The slowest rank counts in each round."""
    if name not in found[0].seconds:
        return None
    by_round = zip(*(rank.seconds[name][size] for rank in found), strict=True)
    slowest = [max(seconds) for seconds in by_round]
    return round(float(statistics.median(slowest)) * 1e3, 4)


def repeats_for(mib: float) -> int:
    """How often an all-reduce is repeated in a round: about the same time for every size."""
    return max(2, min(200, int(40 / max(mib, 1e-9))))


def _deadline(rate: str | None, mib: Sequence[float], rounds: int) -> float:
    """Seconds that two nodes may take, more than enough: ten times all bytes, at 1 Gbit/s at most."""
    bytes_a_second = min(bits_per_second(rate or "1gbit"), 1e9) / 8
    bytes_a_round = sum(size * 2**20 * repeats_for(size) * len(CONTENDERS) for size in mib)
    return 300.0 + 10 * (rounds + 1) * bytes_a_round / bytes_a_second


def _check(ranks: int, nodes: int, rate: str | None, mib: Sequence[float], rounds: int, wire: str) -> None:
    if nodes not in (1, 2):
        raise UsageError(f"--nodes is {nodes}; one machine can stand for 1 or 2")
    if ranks < 1 or ranks * nodes < 2:
        raise UsageError(f"--ranks is {ranks}; an all-reduce takes 2 or more")
    if rate is not None:
        if nodes == 1:
            raise UsageError(f"--rate {rate} is about the link between nodes; add --nodes 2")
        bits_per_second(rate)
    if wire not in WIRES:
        raise UsageError(f"--wire is {wire!r}; use {' or '.join(WIRES)}")
    if rounds < 1:
        raise UsageError(f"--rounds is {rounds}; use 1 or more")
    for size in mib:
        if not 1 <= size * 2**20 / 4 <= 2**30:
            raise UsageError(f"--mib {size:g} cannot be measured; use sizes above 0, up to 4096")
