"""What portable arithmetic costs: each job trained natively and portably in turn, in the same run."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dure.base.errors import DureError, UsageError
from dure.config import load_job
from dure.tools.demo import prepare

EXAMPLES = ("three_weights", "tiny_transformer", "cnn_batchnorm", "cats")
_DRAWN = "dure.tools.demo.cats:photos"
_KINDS = ("native", "portable")
_DEADLINE_SECONDS = 1800


def bench_arithmetic(jobs: Sequence[Path], *, ranks: int = 2, rounds: int = 3) -> dict[str, object]:
    """Train each job `rounds` times with either arithmetic; medians of the training's seconds."""
    found = jobs or [Path("examples") / f"{name}.toml" for name in EXAMPLES]
    for job in found:
        if not job.is_file():
            raise UsageError(f"there is no job {job}; name job files, or call this where `examples/` is")
    with tempfile.TemporaryDirectory(prefix="dure-bench-arithmetic-") as name:
        rows = [_measure(job.absolute(), Path(name), ranks, rounds) for job in found]
    return {"ranks": ranks, "rounds": rounds, "jobs": rows}


def in_words(figures: dict[str, Any]) -> str:
    """A table: a job per line."""
    lines = [f"{'job':20} {'native':>10} {'portable':>10}   cost   weights_sha256 of the portable run"]
    for row in figures["jobs"]:
        native, portable = (row["seconds"][kind] for kind in _KINDS)
        sha256 = row["weights_sha256"]["portable"]
        lines.append(f"{row['job']:20} {native:8.2f} s {portable:8.2f} s  {row['ratio']:5.2f} × {sha256}")
    lines.append(f"seconds of training on {figures['ranks']} ranks, medians of {figures['rounds']} rounds")
    return "\n".join(lines)


def _measure(job: Path, folder: Path, ranks: int, rounds: int) -> dict[str, Any]:
    loaded = load_job(job, {})
    settings = []
    if loaded.job.data.factory == _DRAWN:
        storage = folder / "storage"
        storage.mkdir(exist_ok=True)
        prepare(storage, ranks)
        settings = ["--set", f"storage={storage}"]
    seconds: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    cpu_seconds: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    hashes: dict[str, str] = {}
    for at in range(rounds):
        for kind in _KINDS:
            run = folder / f"{job.stem}-{kind}-{at}"
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            summary = _train(job, run, ranks, [*settings, "--set", f"team.arithmetic={kind}"])
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds[kind].append(float(summary["seconds"]["train"]))
            cpu_seconds[kind].append(
                after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
            )  # with the start
            if hashes.setdefault(kind, summary["weights_sha256"]) != summary["weights_sha256"]:
                raise DureError(f"{job.name}: two {kind} runs of the same job ended with other weights")
    medians = {kind: statistics.median(seconds[kind]) for kind in _KINDS}
    return {
        "job": loaded.job.name,
        "seconds": medians,
        "cpu_seconds": {kind: round(statistics.median(cpu_seconds[kind]), 3) for kind in _KINDS},
        "ratio": round(medians["portable"] / medians["native"], 3) if medians["native"] else None,
        "weights_sha256": hashes,
    }


def _train(job: Path, run: Path, ranks: int, options: Sequence[str]) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "dure",
        "train",
        str(job),
        "--ranks",
        str(ranks),
        "--nodes",
        "1",
        "--json",
    ]
    ran = subprocess.run(
        [*command, "--run-dir", str(run), *options],
        capture_output=True,
        text=True,
        timeout=_DEADLINE_SECONDS,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if ran.returncode:
        raise DureError(f"{job.name} failed: {ran.stderr.strip().splitlines()[-1] if ran.stderr else ''}")
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found
