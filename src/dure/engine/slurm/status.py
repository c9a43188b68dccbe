"""How submitted jobs are: what Slurm says, and how far the run itself is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dure.base.errors import Resumable, UsageError
from dure.base.run_folder import RunFolder
from dure.engine.progress import Progress, progress_of
from dure.engine.slurm import queue
from dure.engine.slurm.queue import Queued
from dure.engine.slurm.submit import Submitted, submitted_from


@dataclass(frozen=True)
class Status:
    """A job and its run."""

    job_id: int
    name: str
    state: str
    """As Slurm has it; `GONE` when Slurm has forgotten the job, as it does some minutes after its end."""
    reason: str
    nodes: int
    hosts: str
    used: str
    limit: str
    requeued: int
    exit_code: int | None
    """Of a job that has ended, while Slurm remembers it."""
    run: Path
    log: Path | None
    progress: Progress | None

    def as_json(self) -> dict[str, Any]:
        """As plain values."""
        paths = {"run": str(self.run), "log": None if self.log is None else str(self.log)}
        return {**asdict(self), **paths}


@dataclass(frozen=True)
class Target:
    """What a user means by a run's folder or a job's number."""

    job_id: int
    run: Path | None
    submitted: Submitted | None
    job: Queued | None
    """None when Slurm has forgotten it."""


def find(target: str) -> Target:
    """The job that `target` names."""
    if target.isascii() and target.isdigit() and not Path(target).is_dir():
        job = next(iter(queue.jobs([int(target)])), None)
        if job is None:
            raise UsageError(
                f"Slurm knows no job {target}, or has forgotten it: it does some minutes after a job's end; give the "
                "run's folder instead"
            )
        if job.run is None:
            raise UsageError(f"job {target}, {job.name!r}, was not submitted by dure; use scancel and squeue")
        return Target(job.id, job.run, submitted_from(job.run), job)
    run = Path(target).absolute()
    submitted = submitted_from(run)
    if submitted is None:
        raise UsageError(
            f"{target} is neither a job's number nor the folder of a run that `dure submit` submitted"
        )
    job = next(iter(queue.jobs([submitted.job_id])), None)
    if job is not None and job.run != submitted.run:
        job = None  # Slurm began to count anew, and this is somebody else's
    return Target(submitted.job_id, run, submitted, job)


def status_of(target: Target) -> Status:
    """How one job is."""
    job, submitted = target.job, target.submitted
    assert target.run is not None
    progress = progress_of(RunFolder(target.run))
    if job is None:
        return Status(
            job_id=target.job_id,
            name=target.run.name,
            state="GONE",
            reason="",
            nodes=0,
            hosts="",
            used="",
            limit="",
            requeued=0,
            exit_code=None,
            run=target.run,
            log=submitted.log if submitted else None,
            progress=progress,
        )
    story = queue.story_of(job.id)
    return Status(
        job_id=job.id,
        name=job.name,
        state=job.state,
        reason=job.reason,
        nodes=job.nodes,
        hosts=job.hosts,
        used=job.used,
        limit=job.limit,
        requeued=story.requeued,
        exit_code=story.exit_code,
        run=target.run,
        log=submitted.log if submitted else None,
        progress=progress,
    )


def all_of_mine() -> list[Status]:
    """All jobs of this user that are in the queue and were submitted by dure."""
    ours = [job for job in queue.jobs() if job.run is not None]
    return [status_of(Target(job.id, job.run, submitted_from(job.run), job)) for job in ours if job.run]


def in_words(found: Sequence[Status]) -> str:
    """For a person: some lines a job."""
    if not found:
        return "no job of yours that dure submitted is in the queue"
    return "\n\n".join(_one_in_words(status) for status in found)


def _one_in_words(status: Status) -> str:
    rows = [("state", _state(status)), ("progress", _progress(status.progress)), ("run", str(status.run))]
    if status.log is not None:
        rows.append(("log", str(status.log)))
    if status.progress is not None and status.progress.weights_sha256:
        rows.append(("sha256", status.progress.weights_sha256))
    return "\n".join([f"job {status.job_id}  {status.name}", *(f"  {word:<10}{text}" for word, text in rows)])


def _state(status: Status) -> str:
    if status.state == "GONE":
        return "no longer in Slurm's memory"
    stopped = status.exit_code == Resumable.exit_code
    words = ["stopped, resumable (75)" if stopped else status.state]
    if status.state in queue.WAITING and status.reason not in ("", "None"):
        words.append(f"({status.reason})")
    if status.hosts:
        words.append(f"on {status.hosts}, {status.used} of {status.limit}")
    else:
        words.append(f"{status.nodes} node(s) wanted, {status.limit} each time")
    if status.requeued:
        words.append(f"· queued again {status.requeued} time{'s' if status.requeued > 1 else ''}")
    return " ".join(words)


def _progress(progress: Progress | None) -> str:
    if progress is None:
        return "not started"
    loss = "" if progress.loss is None else f" · loss {progress.loss:.4g}"
    return f"step {progress.step} of {progress.steps}{loss}{' · done' if progress.done else ''}"
