"""`dure bench reduce`: one all-reduce of a gradient bucket, against Gloo, OpenMPI and a plain copy."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dure.launch import run_team
from dure.run_folder import RunFolder


def bench_reduce(
    *, ranks: int = 4, mib: Sequence[float] = (0.0625, 1, 25, 100), rounds: int = 7
) -> dict[str, Any]:
    """Milliseconds of one all-reduce over `ranks` ranks of this node, medians of interleaved rounds."""
    with tempfile.TemporaryDirectory() as temporary, _openmpi(Path(temporary), ranks) as mpi_folder:
        results: list[Any] = run_team(
            "dure.bench.reduce_ranks:measure",
            (list(mib), rounds, mpi_folder),
            ranks=ranks,
            folder=RunFolder(Path(temporary) / "run"),
            hang_seconds=300,
        )
    return {
        "ranks": ranks,
        "nodes": 1,
        "rate": None,
        "rounds": rounds,
        "results": [
            {
                "mib": size,
                **{
                    f"{name}_ms": _median_ms(results, name, size)
                    for name in ("dure", "gloo", "openmpi", "memcpy")
                },
                "wire_limit_ms": None,
            }
            for size in mib
        ],
    }


def in_words(figures: dict[str, Any]) -> str:
    """A table, with what each peer takes in multiples of dure's time."""
    lines = [
        f"one all-reduce, {figures['ranks']} ranks, {figures['nodes']} node(s), median of {figures['rounds']} rounds",
        f"{'MiB':>8} {'dure':>10} {'Gloo':>18} {'OpenMPI':>18} {'one copy':>18}",
    ]
    for row in figures["results"]:
        cells = [_cell(row[f"{name}_ms"], row["dure_ms"]) for name in ("gloo", "openmpi", "memcpy")]
        lines.append(f"{row['mib']:>8g} {row['dure_ms']:>7.2f} ms " + " ".join(cells))
    return "\n".join(lines)


def _cell(milliseconds: float | None, ours: float) -> str:
    if milliseconds is None:
        return f"{'not installed':>18}"
    return f"{milliseconds:>7.2f} ms {milliseconds / ours:>5.1f} ×"


def _median_ms(results: list[Any], name: str, size: float) -> float | None:
    """The slowest rank counts in each round."""
    if name not in results[0]:
        return None
    by_round = zip(*(result[name][str(size)] for result in results), strict=True)
    slowest: list[float] = [max(seconds) for seconds in by_round]
    return round(statistics.median(slowest) * 1e3, 4)


@contextlib.contextmanager
def _openmpi(folder: Path, ranks: int) -> Iterator[str | None]:
    """OpenMPI's ranks, asleep; None where mpirun or mpi4py is not installed."""
    python = "/usr/bin/python3"
    mpirun = shutil.which("mpirun")
    if (
        mpirun is None
        or subprocess.run([python, "-c", "import mpi4py"], capture_output=True, check=False).returncode
    ):
        yield None
        return
    for name in (*(f"ask-{rank}" for rank in range(ranks)), "answer"):
        os.mkfifo(folder / name)
    peer = Path(__file__).with_name("mpi_peer.py")
    command = [
        mpirun,
        "--oversubscribe",
        "--allow-run-as-root",
        "-n",
        str(ranks),
        python,
        str(peer),
        str(folder),
    ]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield str(folder)
        running.wait(30)
    finally:
        running.terminate()
        running.wait(30)
