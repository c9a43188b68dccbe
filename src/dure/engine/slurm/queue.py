"""Slurm's own commands, each with a deadline, and what they say of jobs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dure.base.errors import DureError, UsageError
from dure.engine.slurm.script import MARK_RUN, MARK_RUNS

ANSWER_SECONDS = 60.0
"""A controller that is busy may take half a minute for an answer."""
_FIELDS = {"id": "%A", "name": "%j", "state": "%T", "reason": "%r", "nodes": "%D", "hosts": "%N"} | {
    "used": "%M", "limit": "%l", "comment": "%k"
}  # fmt: skip
_APART = "\x1f"
WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
"""States of a job that has yet to start, or to start again."""


@dataclass(frozen=True)
class Queued:
    """A job, as Slurm sees it."""

    id: int
    name: str
    state: str
    reason: str
    nodes: int
    hosts: str
    used: str
    """How long it has been running, as Slurm writes it."""
    limit: str
    run: Path | None
    """The run's folder; None for a job that is not ours."""


def has(command: str) -> bool:
    """Whether one of Slurm's commands is here."""
    return shutil.which(command) is not None


def need(command: str) -> None:
    """Refuse to go on without one of Slurm's commands."""
    if not has(command):
        raise UsageError(
            f"there is no {command} here; run this where Slurm's commands are, such as on the cluster's login node. "
            "`dure submit --dry-run` prints the batch script anywhere"
        )


def call(
    words: Sequence[str], *, stdin: str = "", environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands and return how it ended."""
    need(words[0])
    try:
        return subprocess.run(
            words,
            input=stdin,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DureError(
            f"{words[0]} has not answered for {ANSWER_SECONDS:.0f} s; is the cluster's controller up (scontrol ping)?"
        ) from None


def jobs(ids: Sequence[int] | None = None) -> list[Queued]:
    """The jobs with these numbers, or all of this user's; those that are over for some minutes are not known."""
    whose = ["--me"] if ids is None else [f"--jobs={','.join(map(str, ids))}"]
    states = [] if ids is None else ["--states=all"]
    done = call(["squeue", "--noheader", *whose, *states, f"--format={_APART.join(_FIELDS.values())}"])
    if done.returncode != 0:
        if "Invalid job id" in done.stderr:
            return []
        raise DureError(f"squeue failed: {done.stderr.strip()}")
    return [_read(line) for line in done.stdout.split("\n") if line.count(_APART) == len(_FIELDS) - 1]


@dataclass(frozen=True)
class Story:
    """What came before a job's present state."""

    requeued: int
    """How often it was queued again."""
    exit_code: int | None
    """Of a job that has ended."""


def story_of(job_id: int) -> Story:
    """What Slurm remembers of a job's past."""
    told = call(["scontrol", "show", "job", "--oneliner", str(job_id)]).stdout
    requeued = re.search(r" Restarts=([0-9]+) ", told)
    ended = re.search(r" JobState=(?:COMPLETED|FAILED) .* ExitCode=([0-9]+):", told)
    return Story(int(requeued[1]) if requeued else 0, int(ended[1]) if ended else None)


def outside_environment() -> dict[str, str]:
    """The environment without what says which job of Slurm this process is in: it would be taken for a new one's."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SLURM_") or name in ("SLURM_CONF", "SLURM_CLUSTERS")
    }


def submit(text: str) -> int:
    """Hand a batch script to Slurm; returns the job's number."""
    done = call(["sbatch", "--parsable"], stdin=text, environment=outside_environment())
    answer = re.match(r"([0-9]+)(;|$)", done.stdout.strip())
    if done.returncode != 0 or answer is None:
        raise UsageError(f"Slurm refused the job: {(done.stderr or done.stdout).strip()}")
    return int(answer[1])


def send(job_id: int, signal: str) -> None:
    """Send a signal to a job's batch script, and to nothing else of it."""
    _ended_well(call(["scancel", "--batch", f"--signal={signal}", str(job_id)]), job_id)


def end(job_id: int) -> None:
    """End a job at once, or take it out of the queue."""
    _ended_well(call(["scancel", str(job_id)]), job_id)


def _ended_well(done: subprocess.CompletedProcess[str], job_id: int) -> None:
    if done.returncode != 0:
        raise DureError(f"scancel of job {job_id} failed: {done.stderr.strip()}")


def _read(line: str) -> Queued:
    fields = dict(zip(_FIELDS, line.split(_APART), strict=True))
    return Queued(
        id=int(fields["id"]),
        name=fields["name"],
        state=fields["state"],
        reason=fields["reason"],
        nodes=int(fields["nodes"]),
        hosts=fields["hosts"],
        used=fields["used"],
        limit=fields["limit"],
        run=run_in(fields["comment"], int(fields["id"])),
    )


def run_in(comment: str, job_id: int) -> Path | None:
    """The run's folder that the comment of a job names; None where it is another's."""
    if comment.startswith(MARK_RUN):
        return Path(comment.removeprefix(MARK_RUN))
    if comment.startswith(MARK_RUNS):
        return Path(f"{comment.removeprefix(MARK_RUNS)}{job_id}")
    return None
