"""What a job's loggers are told: every so many steps the loss and the learning rate, and every evaluation."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import torch

from dure.base.run_folder import RunFolder
from dure.config import LoadedJob, all_values
from dure.observe import events
from dure.observe.loggers import Row, Run
from dure.observe.loggers.writer import finite_only
from dure.team import Team


class JobLog:
    """Does nothing when the job names no loggers."""

    def __init__(self, loaded: LoadedJob, folder: RunFolder, team: Team, recorder: events.Recorder) -> None:
        self._settings = loaded.job.log
        self._team = team
        self._events = folder.events(0)
        self._recorder = recorder
        self._first: int | None = None
        """The first step that this session logs."""
        if self._settings.to:
            given = {key: value for key, value, source in all_values(loaded) if source != "default"}
            project = self._settings.project or loaded.job.name
            run = Run(folder.path / "loggers", folder.path.name, project, given)
            team.logs.open(self._settings.to, run, self._earlier)

    def step(self, step: int, loss: float, norm: float | None, optimizer: torch.optim.Optimizer) -> None:
        """One of every so many."""
        if self._is_due(step):
            self._log(step, _of_step(loss, float(optimizer.param_groups[0]["lr"]), norm))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Each of them."""
        if self._settings.to:
            self._log(step, _of_evaluation(metrics))

    def _is_due(self, step: int) -> bool:
        return bool(self._settings.to) and (step + 1) % self._settings.every_steps == 0

    def _log(self, step: int, values: dict[str, float]) -> None:
        if self._first is None:
            self._first = step
        self._team.log(values, step=step)

    def _earlier(self) -> Iterator[Row]:
        """What earlier sessions recorded: a killed one may not have come to log it. Called in the loggers' thread."""
        self._recorder.flush()
        first, now = self._first or 0, time.time()
        rows: dict[tuple[int, bool], Row] = {}
        for event in events.read_events(self._events) if first and self._events.exists() else ():
            if isinstance(event, events.Stepped) and event.step < first and self._is_due(event.step):
                values = _of_step(event.loss, event.lr, event.grad_norm)
                rows[event.step, False] = Row(event.step, values, now)
            elif isinstance(event, events.Evaluated) and event.step < first:
                rows[event.step, True] = Row(event.step, _of_evaluation(event.metrics), now)
        yield from (rows[key] for key in sorted(rows))


def _of_step(loss: float, rate: float, norm: float | None) -> dict[str, float]:
    return finite_only({"loss": loss, "lr": rate, "grad_norm": norm})


def _of_evaluation(metrics: Mapping[str, float]) -> dict[str, float]:
    return finite_only({f"eval/{name}": value for name, value in metrics.items()})
