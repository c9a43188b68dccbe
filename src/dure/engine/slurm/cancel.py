"""Ending a submitted job: so that it saves, or at once."""

from __future__ import annotations

from dataclasses import dataclass

from dure.base.errors import UsageError
from dure.engine.slurm import queue
from dure.engine.slurm.script import SAVE_AND_END
from dure.engine.slurm.status import Target

OVER = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
) | {"TIMEOUT"}


@dataclass(frozen=True)
class Cancelled:
    """What was done to a job."""

    job_id: int
    how: str
    """`saves`: it was asked to save and end; `dequeued`: it had not started; `killed`: at once."""
    run: str

    def as_json(self) -> dict[str, object]:
        """As plain values."""
        return vars(self).copy()


def cancel(target: Target, *, now: bool) -> Cancelled:
    """End a job: gently, so that it saves after its step, does not come back, and can go on later; or `now`."""
    job = target.job
    if job is None or job.state in OVER:
        state = "no longer in Slurm's memory" if job is None else job.state
        raise UsageError(f"job {target.job_id} is over already ({state}); there is nothing to end")
    run = str(target.run)
    if job.state in queue.WAITING:
        queue.end(job.id)
        return Cancelled(job.id, "dequeued", run)
    resumable = target.submitted is None or target.submitted.resumable
    if now or job.state != "RUNNING" or not resumable:
        queue.end(job.id)
        return Cancelled(job.id, "killed", run)
    queue.send(job.id, SAVE_AND_END)
    return Cancelled(job.id, "saves", run)


def in_words(done: Cancelled) -> str:
    """For a person, with what to do next."""
    how = {
        "saves": "is asked to end: it saves after its step (dure cancel --now would not)",
        "dequeued": "was not running; it is out of the queue",
        "killed": "is ended at once; what it had saved is there",
    }[done.how]
    return f"job {done.job_id} {how}\n  run  {done.run}"
