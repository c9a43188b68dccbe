"""`dure bench checkpoint`: what saving costs a run, what a step waits for, how fast a state reaches the disk.

    runs     a whole run with a storage checkpoint every so often and states in memory, and the same run without any
    stalls   in the same ranks, in turn: the copies that a step waits for, beside one plain copy of as many bytes
    saves    in the same ranks, in turn: whole saves, beside torch.save, torch.distributed.checkpoint and a plain
             write of as many bytes
    memory   what ranks and the node hold after 10 saves and after 100

In each round the slowest rank counts; figures are medians over rounds.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from dure.base.errors import DureError, UsageError
from dure.base.run_folder import RunFolder
from dure.launch import run_team
from dure.observe.events import CheckpointSaved, Recorded, Stepped
from dure.tools.drill.attempt import Attempt

RUN_BAR, STALL_BAR = 1.035, 1.2
PARTS = ("runs", "stalls", "saves", "memory")
LOOKS = (10, 100)
"""Saves after which memory is looked at."""
_HANG_SECONDS = 600.0
_WARM_UP_STEPS = 4
_ENTRY = "dure.tools.bench.checkpoint_ranks"
_SMALL = (64, 1)
"""Width and layers of the model that is saved often."""

Figures = dict[str, Any]

_JOB = """\
name = "checkpoint"
[model]
factory = "dure.tools.bench.checkpoint_task:model"
args = {{ width = {width}, layers = {layers} }}
[data]
factory = "dure.tools.bench.checkpoint_task:data"
args = {{ samples = 64 }}
global_batch = 8
[train]
steps = {steps}
lr = 1e-4
prove_every = 0
[team]
shards = {ranks}
"""
_WITHOUT = ("--set", "checkpoint.every_seconds=0", "--set", "checkpoint.memory_every=0")


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    width: int = 768
    layers: int = 12
    rounds: int = 2
    """Of whole runs."""
    run_seconds: float = 300.0
    """Of a run without checkpoints: five times the seconds between two. Memory for states is paid for once a run, which
    is a larger part of a shorter one."""
    every_seconds: float = 60.0
    stall_rounds: int = 15
    save_rounds: int = 3


QUICK = Size(width=128, layers=2, rounds=1, run_seconds=8.0, every_seconds=3.0, stall_rounds=3, save_rounds=1)


@dataclass(frozen=True)
class Task:
    """What the ranks are told."""

    folder: str
    width: int
    layers: int
    stall_rounds: int
    save_rounds: int


@dataclass(frozen=True)
class RankFigures:
    """What one rank measured, a figure a round."""

    state_bytes: int
    stalls: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of one plain copy by libc and by torch, of one snapshot for storage, of one state kept in memory."""
    saves: dict[str, list[float]] = field(default_factory=dict)
    """Seconds until a state was on the disk, by way."""
    waits: dict[str, list[float]] = field(default_factory=dict)
    """Of those, the seconds that training stood still."""


@dataclass(frozen=True)
class Flat:
    """Memory after some saves."""

    saves: int
    rank_bytes: int
    """Of this rank alone."""
    states_bytes: int
    """Of the states that the launcher holds."""
    shared_maps: int
    """Shared memory that this rank has mapped: how many pieces."""


def bench_checkpoint(
    *, ranks: int = 4, size: Size | None = None, only: Sequence[str] = PARTS, folder: Path | None = None
) -> Figures:
    """Measure; files go to `folder`, whose disk is the one that is measured (the system's temporary one)."""
    size = size or Size()
    unknown = [part for part in only if part not in PARTS]
    if unknown or not only:
        raise UsageError(f"--only {','.join(only)}: known are {', '.join(PARTS)}, with commas between them")
    if ranks < 1 or size.rounds < 1:
        raise UsageError(f"{ranks} ranks and {size.rounds} rounds cannot be measured; use 1 or more of each")
    figures: Figures = {"ranks": ranks}
    with tempfile.TemporaryDirectory(prefix="dure-bench-checkpoint-", dir=folder) as name:
        if "runs" in only:
            figures["runs"] = _runs(Path(name), ranks, size)
        if "stalls" in only:
            figures["stalls"] = _stalls(Path(name), ranks, size)
        if "saves" in only:
            figures["saves"] = _saves(Path(name), ranks, size)
        if "memory" in only:
            figures["memory"] = memory_after_saves(Path(name), ranks, LOOKS)
    return figures


def _runs(folder: Path, ranks: int, size: Size) -> Figures:
    """Whole runs with and without checkpoints, in turn."""
    job = folder / "job.toml"
    words = {"width": size.width, "layers": size.layers, "ranks": ranks}
    job.write_text(_JOB.format(steps=_WARM_UP_STEPS, **words))
    # The first run warms the machine: memory that it never used before, a virtual one has to get from its host. The
    # second says how long a step takes.
    warm = [
        _whole_run(job, folder / f"warm-up-{at}", ranks, arguments)
        for at, arguments in ((1, ()), (2, _WITHOUT))
    ]
    steps = math.ceil(size.run_seconds / (warm[1]["seconds"]["train"] / _WARM_UP_STEPS))
    job.write_text(_JOB.format(steps=steps, **words))
    ways = {"without": _WITHOUT, "with": ("--set", f"checkpoint.every_seconds={size.every_seconds}")}
    found: dict[str, list[float]] = {name: [] for name in ways}
    late: dict[str, list[float]] = {name: [] for name in ways}
    saved: list[list[float]] = []
    sha256 = set()
    for turn in range(size.rounds):
        for name, arguments in ways.items():
            place = folder / f"{name}-{turn}"
            summary = _whole_run(job, place, ranks, arguments)
            sha256.add(summary["weights_sha256"])
            # Without the launch: importing torch takes a second more or less, and is not what is measured.
            found[name].append(sum(summary["seconds"].values()) - summary["seconds"]["launch"])
            late[name].append(_second_half(place))
            if name == "with":
                saved.append(_checkpoints_saved(place))
    if len(sha256) > 1:
        raise DureError(f"runs with and without checkpoints have other weights: {sorted(sha256)}")
    ratio = statistics.median(found["with"]) / statistics.median(found["without"])
    late_ratio = statistics.median(late["with"]) / statistics.median(late["without"])
    return {
        "parameters": warm[0]["parameters"],
        "steps": steps,
        "rounds": size.rounds,
        "every_seconds": size.every_seconds,
        **{f"{name}_seconds": [round(seconds, 2) for seconds in times] for name, times in found.items()},
        "checkpoints": [len(seconds) for seconds in saved],
        "checkpoint_seconds": saved,
        "ratio": round(ratio, 4),
        "second_half_ratio": round(late_ratio, 4),
        "bar": RUN_BAR,
        "within_bar": ratio <= RUN_BAR,
    }


def _whole_run(job: Path, folder: Path, ranks: int, arguments: Sequence[str]) -> Figures:
    attempt = Attempt(job, RunFolder(folder), ranks, arguments)
    attempt.start()
    try:
        return attempt.summary()
    finally:
        attempt.end()


def _second_half(run: Path) -> float:
    """The seconds of the second half of the steps: what is paid once a run, as for fresh memory, is paid by then."""
    ends = [record.at for record in _events_of(run) if isinstance(record.event, Stepped)]
    return float(ends[-1] - ends[len(ends) // 2])


def _events_of(run: Path) -> list[Recorded]:
    return Attempt(run, RunFolder(run), 1, ()).events()


def _checkpoints_saved(run: Path) -> list[float]:
    """The seconds of each, off the step path."""
    saves = [record.event for record in _events_of(run) if isinstance(record.event, CheckpointSaved)]
    failed = next((save.trouble for save in saves if save.trouble), None)
    if failed is not None:
        raise DureError(f"a checkpoint of the measured run could not be saved: {failed}")
    return [save.seconds for save in saves]


def _measured(folder: Path, ranks: int, size: Size, *, stalls: int = 0, saves: int = 0) -> list[RankFigures]:
    place = folder / ("stalls" if stalls else "saves")
    place.mkdir()
    task = Task(str(place), size.width, size.layers, stalls, saves)
    return cast(list[RankFigures], _on_ranks("measure", (task,), ranks, place / "run"))


def _stalls(folder: Path, ranks: int, size: Size) -> Figures:
    found = _measured(folder, ranks, size, stalls=size.stall_rounds)
    seconds = {name: _median_of_slowest([rank.stalls[name] for rank in found]) for name in found[0].stalls}
    ratios = {name: round(seconds[name] / seconds["copy"], 3) for name in ("snapshot", "memory")}
    first = {name: round(seconds[f"first_{name}"] / seconds["copy"], 3) for name in ratios}
    return {
        "state_bytes": found[0].state_bytes,
        "copy_seconds": round(seconds["copy"], 4),
        "torch_copy_seconds": round(seconds["torch_copy"], 4),
        **{f"{name}_seconds": round(seconds[name], 4) for name in ratios},
        "ratios": ratios,
        "first_ratios": first,
        "bar": STALL_BAR,
        "within_bar": max(ratios.values()) <= STALL_BAR,
    }


def _saves(folder: Path, ranks: int, size: Size) -> Figures:
    found = _measured(folder, ranks, size, saves=size.save_rounds)
    nbytes = found[0].state_bytes
    figures: Figures = {"state_bytes": nbytes}
    for name in found[0].saves:
        seconds = _median_of_slowest([rank.saves[name] for rank in found])
        figures[name] = {
            "seconds": round(seconds, 3),
            "mb_per_second": round(nbytes / seconds / 1e6, 1),
            "waited_seconds": round(_median_of_slowest([rank.waits[name] for rank in found]), 4),
        }
    return figures


def memory_after_saves(folder: Path, ranks: int, looks: tuple[int, ...]) -> list[Figures]:
    """What ranks and states hold after each of these numbers of saves of a small state."""
    args = (str(folder), *_SMALL, looks)
    found = cast(list[list[Flat]], _on_ranks("save_often", args, ranks, folder / "often-run"))
    return [
        {
            "saves": of_ranks[0].saves,
            "ranks_bytes": sum(flat.rank_bytes for flat in of_ranks),
            "states_bytes": of_ranks[0].states_bytes,
            "shared_maps": sum(flat.shared_maps for flat in of_ranks),
        }
        for of_ranks in zip(*found, strict=True)
    ]


def _on_ranks(entry: str, args: tuple[object, ...], ranks: int, folder: Path) -> list[object]:
    # A restart would spoil the figures, but only a launcher that restarts offers memory for states.
    return run_team(
        f"{_ENTRY}:{entry}",
        args,
        ranks=ranks,
        folder=RunFolder(folder),
        hang_seconds=_HANG_SECONDS,
        max_restarts=1,
    )


def _median_of_slowest(of_ranks: Sequence[Sequence[float]]) -> float:
    return float(statistics.median(max(seconds) for seconds in zip(*of_ranks, strict=True)))


_WAYS = {
    "disk": "plain write + fsync",
    "disk_past_cache": "plain write past the cache + fsync",
    "dure": "dure",
    "torch_save": "torch.save by rank 0 + fsync",
    "dcp": "torch.distributed.checkpoint",
    "dcp_async": "torch.distributed.checkpoint, async",
}


def in_words(figures: Figures) -> str:
    """The figures for people."""
    lines = []
    if "runs" in figures:
        runs = figures["runs"]
        lines.append(
            f"whole runs, {figures['ranks']} ranks, {runs['parameters']:,} parameters, {runs['steps']} steps: "
            f"without {_list(runs['without_seconds'])} s, with a checkpoint every {runs['every_seconds']:g} s and "
            f"states in memory {_list(runs['with_seconds'])} s ({_list(runs['checkpoints'])} checkpoints): "
            f"{runs['ratio']:.3f} (bar {runs['bar']}); the second half of the steps alone "
            f"{runs['second_half_ratio']:.3f}"
        )
    if "stalls" in figures:
        stalls = figures["stalls"]
        ratios, first = stalls["ratios"], stalls["first_ratios"]
        lines.append(
            f"one plain copy of {stalls['state_bytes'] / 1e6:,.0f} MB by all ranks at once: "
            f"{stalls['copy_seconds'] * 1e3:.0f} ms by libc, {stalls['torch_copy_seconds'] * 1e3:.0f} ms by torch; of "
            f"libc's, a step waits for a snapshot {ratios['snapshot']:.2f} × (the first {first['snapshot']:.2f} ×), "
            f"for a state in memory {ratios['memory']:.2f} × (the first {first['memory']:.2f} ×) (bar {stalls['bar']})"
        )
    if "saves" in figures:
        lines.append(f"{'until it is on the disk':<38}{'seconds':>9}{'MB/s':>9}{'training waits':>17}")
        for name, title in _WAYS.items():
            row = figures["saves"][name]
            waits = "-" if name.startswith("disk") else f"{row['waited_seconds']:.3f} s"
            lines.append(f"{title:<38}{row['seconds']:>9.2f}{row['mb_per_second']:>9.0f}{waits:>17}")
    for look in figures.get("memory", ()):
        lines.append(
            f"after {look['saves']} saves: {look['ranks_bytes'] / 2**20:.1f} MiB in all ranks, "
            f"{look['states_bytes'] / 2**20:.1f} MiB of states in memory, {look['shared_maps']} maps of shared memory"
        )
    return "\n".join(lines)


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
