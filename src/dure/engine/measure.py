"""Measures a job on this machine for the planner: short real runs of it, and one all-reduce of several sizes."""

from __future__ import annotations

import os
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from dure.base.errors import DureError, JobError
from dure.base.portable import launch_environment
from dure.base.run_folder import RunFolder
from dure.base.say import say
from dure.config import Job, LoadedJob
from dure.launch import LaunchSpec, run_team
from dure.observe import events
from dure.plan.measurement import Measurement, Timed, settings_hash

if TYPE_CHECKING:
    from dure.plan.probe import Probed

STEPS = 24
WARM_STEPS = 6
"""Of those, the first are not counted."""
SAVE_AT = 20
LARGEST_EXCHANGE = 25 << 20
"""A bucket of DDP's."""


@dataclass(frozen=True)
class _Run:
    """What a short run recorded, one list of events a rank."""

    ranks: list[list[events.Event]]
    start_seconds: float

    def each(self, kind: type[Any]) -> list[Any]:
        return [event for rank in self.ranks for event in rank if isinstance(event, kind)]

    def steps(self) -> list[list[events.Stepped]]:
        """The counted steps, by rank."""
        found = []
        for rank in self.ranks:
            steps = [event for event in rank if isinstance(event, events.Stepped)]
            found.append(steps[min(WARM_STEPS, len(steps) // 2) :])
        return found


def measure(loaded: LoadedJob) -> Measurement:
    """Takes some ten seconds beside the time of twice two dozen steps; nothing of the job's own folders is touched."""
    team = loaded.job.team
    cores = max(1, len(os.sched_getaffinity(0)) // team.threads)
    most = min(cores, team.shards)
    with tempfile.TemporaryDirectory(prefix="dure-plan-") as folder:
        say("dure plan: measuring one rank")
        alone = _train(_short(loaded, 1, sync=True), Path(folder) / "alone")
        crowd = None
        if most > 1:
            say(f"dure plan: measuring {most} ranks beside each other")
            crowd = _train(_short(loaded, most, sync=False), Path(folder) / "crowd")
    say("dure plan: measuring the exchange")
    parameters = alone.each(events.TeamFormed)[0].parameters
    probed = _probe(max(2, most), 4 * parameters)
    return _measurement(loaded, cores, alone, crowd, probed, max(2, most))


def _measurement(
    loaded: LoadedJob, cores: int, alone: _Run, crowd: _Run | None, probed: list[Probed], ranks: int
) -> Measurement:
    formed: events.TeamFormed = alone.each(events.TeamFormed)[0]
    (steps,) = alone.steps()
    shards = formed.shards
    shard = _timed([_computed(step) / shards for step in steps])
    saved: list[events.CheckpointSaved] = [one for one in alone.each(events.CheckpointSaved) if one.bytes]
    stalls = [step.seconds.get("save", 0.0) for step in steps]
    sizes = probed[0].exchange
    exchange = {
        size: _timed([max(turn) for turn in zip(*(one.exchange[size] for one in probed), strict=True)])
        for size in sizes
    }
    job = loaded.job
    return Measurement(
        job=job.name,
        settings=settings_hash(loaded),
        host=socket.gethostname(),
        cores=cores,
        device=formed.device,
        tflops=max(one.flops for one in probed) / 1e12,
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        parameters=formed.parameters,
        samples=formed.samples,
        batch=job.data.global_batch,
        shards=shards,
        steps=job.train.steps or 0,
        shard=shard,
        update=_timed([step.seconds.get("update", 0.0) for step in steps]),
        data=_timed([step.seconds.get("data", 0.0) / shards for step in steps]),
        jitter=shard.spread / 0.6745,  # half the quartiles' distance of a normal distribution
        crowding=_crowding(shard.seconds * shards / job.data.global_batch, crowd),
        exchange=exchange,
        exchange_ranks=ranks,
        state_bytes=max((one.bytes for one in saved), default=0),
        save_stall=Timed(seconds=max(stalls, default=0.0), spread=0.2),
        storage_bytes_per_second=max((one.bytes / max(one.seconds, 1e-6) for one in saved), default=1e8),
        rank_bytes=max((one.bytes for one in alone.each(events.MemoryUsed)), default=0),
        start_seconds=alone.start_seconds,
    )


def _crowding(sample_seconds: float, crowd: _Run | None) -> float:
    """How much longer a sample takes with all cores busy; each rank has its own model, and nothing is exchanged."""
    if crowd is None:
        return 1.0
    each = [
        statistics.median(_computed(step) / step.samples for step in steps if step.samples)
        for steps in crowd.steps()
    ]
    return max(1.0, statistics.mean(each) / sample_seconds)


def _computed(step: events.Stepped) -> float:
    """Seconds of a step's own work on its shards: sums of their gradients too, but no waiting for others."""
    seconds = step.seconds
    return seconds.get("compute", 0.0) + seconds.get("exchange", 0.0) - seconds.get("wait", 0.0)


def _timed(values: Sequence[float]) -> Timed:
    middle = statistics.median(values)
    if len(values) < 4 or middle <= 0:
        return Timed(seconds=middle, spread=0.5)
    first, _, third = statistics.quantiles(values, n=4)
    return Timed(seconds=middle, spread=(third - first) / 2 / middle)


def _short(loaded: LoadedJob, ranks: int, *, sync: bool) -> LoadedJob:
    """The job for some steps, on this machine alone, saving once, in the run's own folder."""
    raw = loaded.job.model_dump(mode="json")
    steps = min(STEPS, loaded.job.train.steps or STEPS)
    raw["train"] |= {"epochs": None, "steps": steps, "prove_every": 0, "receipt_every": 0}
    raw["team"] |= {"ranks": ranks, "min_ranks": None, "sync": sync, "max_restarts": 0}
    if not sync:
        raw["train"]["shard_optimizer"] = False
    raw["checkpoint"] = {
        "every_steps": min(SAVE_AT, max(1, steps - 2)) if sync else 0,
        "every_seconds": 0,
        "memory_every": 0,
    }
    for section in ("eval", "cluster", "slurm", "log"):
        raw[section] = {}
    raw["hooks"] = None
    try:
        return replace(loaded, job=Job.model_validate(raw))
    except ValidationError as error:
        raise JobError(
            f"dure plan cannot run this job for {steps} steps: {error.errors()[0]['msg']}"
        ) from None


def _train(loaded: LoadedJob, path: Path) -> _Run:
    folder = RunFolder(path)
    folder.create()
    team = loaded.job.team
    began = time.perf_counter()
    spec = LaunchSpec(
        ranks=team.ranks,
        folder=folder,
        environment=launch_environment(team.arithmetic),
        hang_seconds=team.hang_seconds,
        max_restarts=0,
    )
    results = run_team("dure.train:run_rank", (loaded.to_json(), str(path)), spec, threads=team.threads)
    seconds = time.perf_counter() - began
    trained = max(cast("Any", result).seconds["train"] for result in results)
    recorded = [list(events.read_events(folder.events(rank))) for rank in range(team.ranks)]
    if not all(any(isinstance(event, events.Stepped) for event in rank) for rank in recorded):
        raise DureError(
            "dure plan: the short run recorded no step; run the job for some steps and see its logs"
        )
    return _Run(recorded, max(0.0, seconds - trained))


def _probe(ranks: int, gradient_bytes: int) -> list[Probed]:
    largest = max(1 << 20, min(LARGEST_EXCHANGE, gradient_bytes))
    sizes = sorted({1 << 16, largest})
    with tempfile.TemporaryDirectory(prefix="dure-plan-") as path:
        found = run_team(
            "dure.plan.probe:measure", (sizes,), LaunchSpec(ranks=ranks, folder=RunFolder(Path(path)))
        )
    return cast("list[Probed]", found)
