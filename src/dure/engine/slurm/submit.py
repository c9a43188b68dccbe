"""Submitting: the log's folder, the job, and a note in the run's folder of what was asked."""

from __future__ import annotations

import json
import shlex
import time
from dataclasses import dataclass
from pathlib import Path

from dure.base.errors import UsageError
from dure.base.files import make_folders, read_at_most, write_whole
from dure.base.say import printable, say
from dure.engine.slurm import queue
from dure.engine.slurm.request import Request
from dure.engine.slurm.script import script


@dataclass(frozen=True)
class Submitted:
    """A job that was handed to Slurm."""

    job_id: int
    run: Path
    log: Path
    resumable: bool
    """Whether it can be asked to save."""

    def as_json(self) -> dict[str, object]:
        """As plain values."""
        return {
            "job_id": self.job_id,
            "run": str(self.run),
            "log": str(self.log),
            "resumable": self.resumable,
        }


_LONGEST_NOTE = 4 << 20


def note_in(run: Path) -> Path:
    """Where a run's folder says which job of Slurm it is."""
    return run / "submit.json"


def submit(request: Request) -> Submitted:
    """Make the folders, submit, and note in the run's folder what was submitted."""
    text = script(request)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the batch script would have {printable(text[error.start - 20 : error.end + 20])} in it, which is not "
            "UTF-8; rename that file or folder"
        ) from None
    queue.need("sbatch")
    if request.run is not None and (earlier := submitted_from(request.run)) is not None:
        running = [job for job in queue.jobs([earlier.job_id]) if job.state in (*queue.WAITING, "RUNNING")]
        if running:
            raise UsageError(
                f"{request.run} is the run of job {earlier.job_id}, which is {running[0].state}; two jobs cannot have "
                f"one run. `dure cancel {earlier.job_id}` ends it"
            )
    try:
        make_folders(request.logs)
    except OSError as error:
        raise UsageError(
            f"cannot make the log's folder {request.logs}: {error.strerror}; give another --run-dir"
        ) from None
    job_id = queue.submit(text)
    done = Submitted(job_id, request.run_of(job_id), request.log(job_id), request.resumable)
    note = {**done.as_json(), "submitted": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "script": text}
    try:
        make_folders(done.run)
        write_whole(note_in(done.run), json.dumps(note, indent=1))
    except OSError as error:  # the job is in the queue all the same, and its number finds it
        say(f"cannot note the job in {done.run}: {error.strerror}")
    return done


def submitted_from(run: Path) -> Submitted | None:
    """What a run's folder says of the job that it belongs to; None when it was never submitted."""
    try:
        raw = json.loads(read_at_most(note_in(run), _LONGEST_NOTE))
        return Submitted(int(raw["job_id"]), Path(raw["run"]), Path(raw["log"]), bool(raw["resumable"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else printable(str(error), 200)
        raise UsageError(f"{note_in(run)} cannot be read: {reason}; give the job's number instead") from None


def in_words(done: Submitted) -> str:
    """For a person, with what to do next."""
    log = shlex.quote(str(done.log))
    return (
        f"job {done.job_id} is in the queue\n"
        f"  run       {done.run}\n"
        f"  log       tail -F {log}\n"
        f"  progress  dure status {done.job_id}\n"
        f"  end       dure cancel {done.job_id}"
    )
