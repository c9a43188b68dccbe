"""What a job's loggers are told: every so many steps the loss and the learning rate, and every evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from dure.config import LoadedJob, all_values
from dure.observe.loggers.writer import finite_only
from dure.team import Team


class JobLog:
    """Does nothing when the job names no loggers."""

    def __init__(self, loaded: LoadedJob, run: Path, team: Team) -> None:
        self._settings = loaded.job.log
        self._team = team
        if self._settings.to:
            given = {key: value for key, value, source in all_values(loaded) if source != "default"}
            team.log_to(
                *self._settings.to,
                folder=run / "loggers",
                name=run.name,
                project=self._settings.project or loaded.job.name,
                config=given,
            )

    def step(self, step: int, loss: float, norm: float | None, optimizer: torch.optim.Optimizer) -> None:
        """One of every so many."""
        if self._settings.to and (step + 1) % self._settings.every_steps == 0:
            values = {"loss": loss, "lr": float(optimizer.param_groups[0]["lr"]), "grad_norm": norm}
            self._team.log(finite_only(values), step=step)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Each of them."""
        if self._settings.to:
            values = {f"eval/{name}": value for name, value in metrics.items()}
            self._team.log(finite_only(values), step=step)
