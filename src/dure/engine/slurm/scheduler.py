"""`dure submit|status|cancel|logs`, by Slurm's own commands."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from dure.base.errors import UsageError
from dure.engine.interface import Asked
from dure.engine.slurm import cancel, status, submit
from dure.engine.slurm.prepare import prepare
from dure.engine.slurm.request import Request
from dure.engine.slurm.script import script

_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class _Submitted:
    done: submit.Submitted

    def as_json(self) -> dict[str, object]:
        return self.done.as_json()

    def in_words(self) -> str:
        return submit.in_words(self.done)


@dataclass(frozen=True)
class _Statuses:
    found: tuple[status.Status, ...]

    def as_json(self) -> dict[str, object]:
        return {"jobs": [one.as_json() for one in self.found]}

    def in_words(self) -> str:
        return status.in_words(self.found)


@dataclass(frozen=True)
class _Cancelled:
    done: cancel.Cancelled

    def as_json(self) -> dict[str, object]:
        return self.done.as_json()

    def in_words(self) -> str:
        return cancel.in_words(self.done)


class SlurmScheduler:
    """Slurm's queue. A target is a job's number, or a run's folder."""

    def draft(self, asked: Asked) -> str:
        """The batch script."""
        return script(_request(asked))

    def submit(self, asked: Asked) -> _Submitted:
        """Hand the batch script to sbatch."""
        return _Submitted(submit.submit(_request(asked)))

    def status(self, target: str | None) -> _Statuses:
        """How a job is, or all of this user's."""
        found = status.all_of_mine() if target is None else [status.status_of(status.find(target))]
        return _Statuses(tuple(found))

    def cancel(self, target: str, *, now: bool) -> _Cancelled:
        """End a job, gently or at once."""
        return _Cancelled(cancel.cancel(status.find(target), now=now))

    def logs(self, target: str, *, follow: bool) -> Iterator[str]:
        """The job's log, in all its attempts."""
        found = status.find(target)
        if found.submitted is None:
            raise UsageError(
                f"the run's folder of job {target} does not say where its log is; `tail` it yourself"
            )
        try:
            with found.submitted.log.open(errors="replace") as log:
                while True:
                    for line in log:
                        yield line.rstrip("\n")
                    if not follow or _is_over(target):
                        return
                    time.sleep(_LOOK_SECONDS)
        except FileNotFoundError:
            raise UsageError(f"{found.submitted.log} is not there yet: the job has not started") from None


def _is_over(target: str) -> bool:
    job = status.find(target).job
    return job is None or job.state in cancel.OVER


def _request(asked: Asked) -> Request:
    return prepare(asked.loaded, asked.job, asked.settings, asked.ranks, asked.run_dir)
