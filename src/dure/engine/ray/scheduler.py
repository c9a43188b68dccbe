"""`dure submit|status|cancel|logs --engine ray`: Ray's job queue runs `dure train --engine ray` on its head node."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shlex
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dure.base.errors import DureError, UsageError
from dure.base.run_folder import RunFolder
from dure.base.say import printable
from dure.engine.interface import Asked
from dure.engine.progress import Progress, progress_of
from dure.engine.ray.result import refuse_without_ray

_RUN, _BY = "dure.run", "dure"
"""Keys of a job's metadata."""
_DEFAULT = "http://127.0.0.1:8265"


@dataclass(frozen=True)
class Submitted:
    """A job that Ray has taken."""

    job_id: str
    address: str
    run: str

    def as_json(self) -> dict[str, object]:
        """As plain values."""
        return asdict(self)

    def in_words(self) -> str:
        """For a person, with what to do next."""
        where = f"{self.job_id} --engine ray"
        return (
            f"job {self.job_id} is with Ray at {self.address}\n"
            f"  run       {self.run}\n"
            f"  log       dure logs {where} --follow\n"
            f"  progress  dure status {where}\n"
            f"  end       dure cancel {where}"
        )


@dataclass(frozen=True)
class Status:
    """A job of Ray and its run."""

    job_id: str
    state: str
    message: str
    run: str
    progress: Progress | None


@dataclass(frozen=True)
class Statuses:
    """How several are."""

    jobs: tuple[Status, ...]

    def as_json(self) -> dict[str, object]:
        """As plain values."""
        return {"jobs": [asdict(job) for job in self.jobs]}

    def in_words(self) -> str:
        """For a person."""
        return "\n\n".join(_in_words(job) for job in self.jobs) or "Ray has no job that dure submitted"


@dataclass(frozen=True)
class Cancelled:
    """What was done to a job."""

    job_id: str
    how: str
    """`saves`: asked to save and end; `killed`: at once."""
    run: str

    def as_json(self) -> dict[str, object]:
        """As plain values."""
        return asdict(self)

    def in_words(self) -> str:
        """For a person, with what to do next."""
        how = "is asked to end: it saves after its step" if self.how == "saves" else "is ended at once"
        return f"job {self.job_id} {how}\n  run  {self.run}"


class RayScheduler:
    """Ray's job queue, by the address of its dashboard. A target is a job's id."""

    def __init__(self, address: str | None = None) -> None:
        self._address = address

    def draft(self, asked: Asked) -> str:
        """The command that Ray would run."""
        return _entrypoint(asked, _run_of(asked)) + "\n"

    def submit(self, asked: Asked) -> Submitted:
        """Hand the command to Ray."""
        run = _run_of(asked)
        address = self._url(asked.loaded.job.ray.address)
        with _asking(address):
            job_id = _client(address).submit_job(
                entrypoint=_entrypoint(asked, run),
                submission_id=f"dure-{uuid.uuid4().hex[:12]}",
                metadata={"submitted_by": _BY, _RUN: str(run)},
            )
        return Submitted(str(job_id), address, str(run))

    def status(self, target: str | None) -> Statuses:
        """How a job is, or all that dure submitted."""
        with _asking(self._url(None)):
            jobs = _client(self._url(None)).list_jobs()
        found = [_status(job) for job in jobs if (job.metadata or {}).get("submitted_by") == _BY]
        if target is not None:
            found = [job for job in found if job.job_id == target]
            if not found:
                raise UsageError(f"Ray knows no job {printable(target, 100)} that dure submitted")
        return Statuses(tuple(found))

    def cancel(self, target: str, *, now: bool) -> Cancelled:
        """Have a job save and end, by a file in its run's folder; or stop it at once, by Ray."""
        job = self.status(target).jobs[0]
        if job.state not in ("PENDING", "RUNNING"):
            raise UsageError(f"job {target} is over already ({job.state}); there is nothing to end")
        folder = RunFolder(Path(job.run))
        # Ray itself would wait 3 s, and kill.
        if not now and folder.job.exists():
            folder.stop.touch()
            return Cancelled(job.job_id, "saves", job.run)
        with _asking(self._url(None)):
            _client(self._url(None)).stop_job(job.job_id)
        return Cancelled(job.job_id, "killed", job.run)

    def logs(self, target: str, *, follow: bool) -> Iterator[str]:
        """What the command has printed: all nodes' output, each line with its node."""
        client = _client(self._url(None))
        self.status(target)
        with _asking(self._url(None)):
            if not follow:
                yield from str(client.get_job_logs(target)).splitlines()
                return
            tail = client.tail_job_logs(target)
            loop = asyncio.new_event_loop()
            try:
                rest = ""
                while True:
                    try:
                        rest += loop.run_until_complete(anext(tail))
                    except StopAsyncIteration:
                        break
                    *lines, rest = rest.split("\n")
                    yield from lines
                if rest:
                    yield rest
            finally:
                loop.close()

    def _url(self, of_job: str | None) -> str:
        given = self._address or of_job
        if given is None:
            return _DEFAULT
        return given if given.startswith("http") else f"http://{given}"


def _entrypoint(asked: Asked, run: Path) -> str:
    """The command; Ray hands it to a shell."""
    words = [
        asked.loaded.job.cluster.python or sys.executable,
        "-m",
        "dure",
        "train",
        str(asked.job.absolute()),
    ]
    words += ["--engine=ray", f"--run-dir={run}", "--set=ray.address="]
    words += [f"--set={setting}" for setting in asked.settings]
    words += [] if asked.ranks is None else [f"--ranks={asked.ranks}"]
    words += [] if asked.nodes is None else [f"--nodes={asked.nodes}"]
    return shlex.join(words)


def _run_of(asked: Asked) -> Path:
    if asked.run_dir is None and "://" in asked.loaded.storage:
        raise UsageError(
            "the storage is a bucket: give --run-dir, a folder that all of Ray's nodes see at the same path"
        )
    return (asked.run_dir or asked.loaded.run_in_storage(time.strftime("%Y%m%d-%H%M%S"))).absolute()


def _client(address: str) -> Any:
    refuse_without_ray()
    if not re.fullmatch(r"https?://[^\s/]+/?", address):
        raise UsageError(
            f"Ray's dashboard is {printable(address, 100)}; give --ray-address HOST:8265, or a URL of it"
        )
    from ray.job_submission import JobSubmissionClient

    with _asking(address):
        return JobSubmissionClient(address)


@contextlib.contextmanager
def _asking(address: str) -> Iterator[None]:
    try:
        yield
    except (ConnectionError, RuntimeError, OSError, ValueError) as error:
        raise DureError(
            f"Ray's dashboard at {printable(address, 100)} does not answer as it should: {printable(str(error), 300)}; "
            "give its address with --ray-address (the head node's, port 8265)"
        ) from None


def _status(job: Any) -> Status:
    run = str(job.metadata.get(_RUN, ""))
    return Status(
        job_id=str(job.submission_id),
        state=str(getattr(job.status, "value", job.status)),
        message=printable(job.message or "", 300),
        run=run,
        progress=progress_of(RunFolder(Path(run))) if run else None,
    )


def _in_words(job: Status) -> str:
    step = "not started"
    if job.progress is not None:
        step = f"step {job.progress.step} of {job.progress.steps}{' · done' if job.progress.done else ''}"
    return (
        f"job {job.job_id}\n  state     {job.state} {job.message}\n  progress  {step}\n  run       {job.run}"
    )
