"""The experiments of the lesson: each a few `dure` commands, run for real in a folder that is removed afterwards."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dure.base.errors import UsageError
from dure.tools.lab import why_not_here
from dure.tools.lesson.jobs import write_job

DURE = (sys.executable, "-m", "dure")
HOSTS = ("10.0.1.10", "10.0.1.11")


@dataclass(frozen=True)
class Command:
    """One command of an experiment."""

    label: str
    """What its result is called in what the lesson draws."""
    argv: tuple[str, ...]
    rows: Path | None = None
    """A folder with rank-N.jsonl that the ranks write."""
    json: bool = False
    """Whether it prints one JSON object: its result."""
    run: Path | None = None
    """The run's folder, for events and for whoever kills one of its ranks."""
    cwd: Path | None = None
    """Where it runs; None: in the experiment's folder. The lab's nodes have a /tmp of their own, where that is not."""
    always: bool = False
    """Whether it runs also when one before it failed: it tidies up."""


@dataclass(frozen=True)
class Experiment:
    """How the commands of an experiment follow from what the reader chose."""

    commands: Callable[..., Iterator[Command]]
    choices: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """The values that each argument may have."""


def _task(folder: Path, task: str, ranks: int, arguments: str, label: str | None = None) -> Command:
    rows = folder / (label or task)
    rows.mkdir()
    run = (*DURE, "run", "--ranks", str(ranks), "--run-dir", str(folder / f"{label or task}-run"))
    return Command(
        label or task, (*run, "-m", "dure.tools.lesson.tasks", task, arguments, str(rows)), rows=rows
    )


def _train(job: Path, label: str, *options: str) -> Command:
    run = job.parent / f"run-{label}"
    return Command(
        label, (*DURE, "train", str(job), "--json", "--run-dir", str(run), *options), json=True, run=run
    )


def copies(folder: Path, how: str = "seed", ranks: int = 4) -> Iterator[Command]:
    """Chapter 3."""
    yield _task(folder, "copies", ranks, f'{{"how": "{how}"}}')


def split(folder: Path, kind: str = "interleaved", ranks: int = 4) -> Iterator[Command]:
    """Chapter 4."""
    yield _task(folder, "split", ranks, f'{{"kind": "{kind}", "ranks": {ranks}}}')


def apart(folder: Path) -> Iterator[Command]:
    """Chapter 5: without synchronisation, then with it."""
    yield _task(folder, "train", 4, '{"sync": false}', "apart")
    yield _task(folder, "train", 4, '{"sync": true}', "together")


def load(folder: Path, ranks: int = 4) -> Iterator[Command]:
    """Chapter 8: a file of weights is made, then read in two ways; and weights from a seed, with no read at all."""
    made = write_job(folder, "made", width=2048, steps=1, save=True)
    yield _train(made, "made", "--ranks", "1")
    weights = folder / "weights.safetensors"
    yield Command("export", (*DURE, "export", str(made.parent / "run-made"), str(weights)))
    for way in ("every-rank", "slices"):
        job = write_job(folder, way, width=2048, steps=1, weights=str(weights), load=way)
        yield _train(job, way, "--ranks", str(ranks))
    yield _train(write_job(folder, "seed", width=2048, steps=1), "seed", "--ranks", str(ranks))


def nodes(folder: Path) -> Iterator[Command]:
    """Chapter 9: two nodes of two ranks on this machine, then one rank alone: the same weights."""
    reason = why_not_here()
    if reason is not None:
        raise UsageError(f"two nodes cannot be made here: {reason}")
    name = f"lesson-{os.getpid()}"
    storage = folder / "shared"
    (storage / "checkpoints").mkdir(parents=True)
    alone = write_job(folder, "alone", steps=30)
    job = write_job(storage, "nodes", steps=30, hosts=HOSTS)
    text = job.read_text(encoding="utf-8").replace(str(storage), "/mnt/shared")
    job.write_text(text.replace("ranks = 4", "ranks = 2"), encoding="utf-8")
    try:
        up = (*DURE, "lab", "up", "--name", name, "--nodes", "2", "--storage", str(storage))
        yield Command("up", up, cwd=Path("/"))
        train = (
            *DURE,
            "train",
            "/mnt/shared/nodes.toml",
            "--json",
            "--run-dir",
            "/mnt/shared/checkpoints/run",
        )
        yield Command(
            "nodes",
            (*DURE, "lab", "exec", "--name", name, "login", "--", *train),
            json=True,
            run=storage / "checkpoints" / "run",
            cwd=Path("/"),
        )
    finally:
        yield Command("down", (*DURE, "lab", "down", "--name", name), cwd=Path("/"), always=True)
    yield _train(alone, "alone", "--ranks", "1")


def speed(folder: Path) -> Iterator[Command]:
    """Chapter 10: the same job on 1, 2 and 4 ranks."""
    job = write_job(folder, "speed", width=1024, steps=60)
    for ranks in (1, 2, 4):
        yield _train(job, str(ranks), "--ranks", str(ranks))


def kill(folder: Path) -> Iterator[Command]:
    """Chapter 11: a run that the reader disturbs, then the same run in peace."""
    job = write_job(folder, "kill", steps=250, batch=64, pace=0.002, save=True)
    yield _train(job, "disturbed", "--ranks", "4")
    yield _train(job, "peace", "--ranks", "4")


RANKS = (1, 2, 3, 4, 5, 6, 7, 8)
EXPERIMENTS = {
    "copies": Experiment(copies, {"how": ("seed", "broadcast"), "ranks": RANKS}),
    "split": Experiment(split, {"kind": ("interleaved", "blocks"), "ranks": RANKS}),
    "apart": Experiment(apart),
    "load": Experiment(load, {"ranks": RANKS}),
    "nodes": Experiment(nodes),
    "speed": Experiment(speed),
    "kill": Experiment(kill),
}


def checked(name: object, arguments: object) -> tuple[Experiment, dict[str, Any]]:
    """The experiment that a reader asks for; every argument is one of the values it may have."""
    if not isinstance(name, str) or name not in EXPERIMENTS:
        raise UsageError(f"there is no experiment {name!r}; there are {', '.join(EXPERIMENTS)}")
    found = EXPERIMENTS[name]
    if not isinstance(arguments, dict):
        raise UsageError("the arguments of an experiment are an object")
    for key, value in arguments.items():
        allowed = found.choices.get(key, ())
        if not any(type(value) is type(each) and value == each for each in allowed):
            raise UsageError(f"{name}: {key} cannot be {value!r}; use one of {', '.join(map(str, allowed))}")
    return found, arguments
