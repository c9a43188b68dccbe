"""How long until a team stands, and a first step is trained: against `torchrun`, and against `import torch`."""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dure.base.errors import DureError
from dure.launch.team import listen

_SCRIPT = """\
import os, sys, time
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
with open(os.path.join(sys.argv[1], "rank-" + os.environ["RANK"]), "w") as file:
    file.write(repr(time.clock_gettime(time.CLOCK_MONOTONIC)))
dist.destroy_process_group()
"""
_JOB = """\
name = "one_step"
[model]
factory = "one_step.py:model"
[data]
factory = "one_step.py:data"
global_batch = 8
[train]
steps = 1
lr = 0.1
"""
_PARTS = """\
import torch

def model():
    return torch.nn.Linear(4, 2)

def data():
    return torch.utils.data.TensorDataset(torch.ones(8, 4), torch.zeros(8, dtype=torch.int64))
"""
TRAIN_RANKS = 4
LEAST_RATIO = 5.0
"""The bar: so many times sooner than torchrun at a first barrier."""
MOST_OF_IMPORT = 1.5
"""The bar: `dure train` of one step takes at most so many times what `import torch` takes."""
_DEADLINE_SECONDS = 300


@dataclass(frozen=True)
class Start:
    """One start of a team, in seconds from the start of the command."""

    barrier: float
    """Until the last rank had passed the first barrier."""
    exit: float
    """Until the command had ended."""
    cpu: float
    """CPU-seconds of all its processes, to its end: hardly touched by what else the machine does."""


def bench_start(*, ranks: int = 8, rounds: int = 3, command: Sequence[str] = ("dure",)) -> dict[str, object]:
    """Bring `ranks` ranks to a first barrier and end, `rounds` times with each launcher in turn.

    Beside it, train one step on `TRAIN_RANKS` ranks, and import torch.

    `command` is the module (and first arguments) that `python -m` starts for our side.
    """
    runs: dict[str, list[Start]] = {"dure": [], "torchrun": []}
    whole: dict[str, list[tuple[float, float]]] = {"train": [], "import": []}
    with tempfile.TemporaryDirectory(prefix="dure-bench-start-") as name:
        folder = Path(name)
        script = folder / "barrier.py"
        script.write_text(_SCRIPT)
        # One start that does not count: it fills the page cache and writes what Python compiles.
        _start(_dure(command, script, ranks, folder), ranks, folder)
        for _ in range(rounds):
            runs["torchrun"].append(_start(_torchrun(script, ranks, folder), ranks, folder))
            runs["dure"].append(_start(_dure(command, script, ranks, folder), ranks, folder))
            whole["train"].append(_run(_train(command, folder)))
            whole["import"].append(_run([sys.executable, "-c", "import torch"]))
    train, train_cpu = (statistics.median(column) for column in zip(*whole["train"], strict=True))
    imports, import_cpu = (statistics.median(column) for column in zip(*whole["import"], strict=True))
    ours = statistics.median(start.barrier for start in runs["dure"])
    theirs = statistics.median(start.barrier for start in runs["torchrun"])
    ours_exit = statistics.median(start.exit for start in runs["dure"])
    theirs_exit = statistics.median(start.exit for start in runs["torchrun"])
    return {
        "ranks": ranks,
        "rounds": rounds,
        "dure_seconds": round(ours, 3),
        "torchrun_seconds": round(theirs, 3),
        "ratio": round(theirs / ours, 2),
        "bar_ratio": LEAST_RATIO,
        "dure_exit_seconds": round(ours_exit, 3),
        "torchrun_exit_seconds": round(theirs_exit, 3),
        "exit_ratio": round(theirs_exit / ours_exit, 2),
        "dure_cpu_seconds": round(statistics.median(start.cpu for start in runs["dure"]), 3),
        "torchrun_cpu_seconds": round(statistics.median(start.cpu for start in runs["torchrun"]), 3),
        "train_ranks": TRAIN_RANKS,
        "train_one_step_seconds": round(train, 3),
        "import_torch_seconds": round(imports, 3),
        "train_over_import": round(train / imports, 2),
        "bar_train_over_import": MOST_OF_IMPORT,
        "train_one_step_cpu_seconds": round(train_cpu, 3),
        "import_torch_cpu_seconds": round(import_cpu, 3),
        "dure_rounds": [round(start.barrier, 3) for start in runs["dure"]],
        "torchrun_rounds": [round(start.barrier, 3) for start in runs["torchrun"]],
    }


def _dure(command: Sequence[str], script: Path, ranks: int, folder: Path) -> list[str]:
    own = ["run", str(script), "--ranks", str(ranks), "--run-dir", str(folder / "run")]
    return [sys.executable, "-m", *command, *own, "--", str(folder)]


def _torchrun(script: Path, ranks: int, folder: Path) -> list[str]:
    with listen(0) as listener:
        port = listener.getsockname()[1]
    own = ["--nproc-per-node", str(ranks), "--master-port", str(port), "--log-dir", str(folder / "torchrun")]
    return [sys.executable, "-m", "torch.distributed.run", *own, str(script), str(folder)]


def _train(command: Sequence[str], folder: Path) -> list[str]:
    job = folder / "one_step.toml"
    job.write_text(_JOB)
    (folder / "one_step.py").write_text(_PARTS)
    shutil.rmtree(folder / "trained", ignore_errors=True)
    own = ["train", str(job), "--ranks", str(TRAIN_RANKS), "--run-dir", str(folder / "trained"), "--json"]
    return [sys.executable, "-m", *command, *own]


def _start(command: Sequence[str], ranks: int, folder: Path) -> Start:
    began = time.clock_gettime(time.CLOCK_MONOTONIC)
    seconds, cpu = _run(command)
    marks = [folder / f"rank-{rank}" for rank in range(ranks)]
    last = max(float(mark.read_text()) for mark in marks)
    for mark in marks:
        mark.unlink()
    return Start(last - began, seconds, cpu)


def _run(command: Sequence[str]) -> tuple[float, float]:
    """Run a command to its end; returns its seconds, and the CPU-seconds of all its processes."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    cpu, began = _children_cpu(), time.monotonic()
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=_DEADLINE_SECONDS, check=False
    )
    ended = time.monotonic()
    if done.returncode != 0:
        raise DureError(f"{' '.join(command[:4])} ended with {done.returncode}: {done.stderr[-2000:]}")
    return ended - began, _children_cpu() - cpu


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
