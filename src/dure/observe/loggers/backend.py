"""What every logger offers, and the error when its package is missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dure.base.errors import UsageError


@dataclass(frozen=True)
class Row:
    """What was logged of one step at one time."""

    step: int
    values: Mapping[str, float]
    at: float
    """Seconds since the epoch."""


@dataclass(frozen=True)
class Run:
    """What a logger has to know of a run."""

    folder: Path
    """Of all loggers; each has its own folder or file in it."""
    name: str
    project: str
    config: Mapping[str, Any] = field(default_factory=dict)
    """Plain values, shown beside the metrics."""


class Backend(Protocol):
    """One logger. Used by one thread, never the training thread."""

    def logged(self) -> Mapping[str, int]:
        """The last step of each metric that the run has from earlier sessions."""
        ...

    def write(self, rows: Sequence[Row]) -> None:
        """Log these, in order."""
        ...

    def close(self) -> None:
        """Bring everything to where it belongs."""
        ...


PACKAGES = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb", "trackio": "trackio"}
"""Loggers that need a package, each an extra of its own name."""
NAMES = ("csv", "jsonl", *PACKAGES)


def refuse_missing(names: Sequence[str]) -> None:
    """Before anything is trained: UsageError for a logger that is not known, or whose package is not there."""
    for name in names:
        if name not in NAMES:
            raise UsageError(f"there is no logger {name!r}; there are {', '.join(NAMES)}")
        if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
            raise UsageError(
                f"the logger {name} needs a package that is not installed; pip install 'dure[{name}]', or leave it out"
            )


def open_backend(name: str, run: Run) -> Backend:
    """A logger, with the run that it has already, if there is one."""
    if name in ("csv", "jsonl"):
        from dure.observe.loggers.files import LinesFile

        return LinesFile(run.folder / f"metrics.{name}")
    if name == "tensorboard":
        from dure.observe.loggers.tensorboard import TensorBoard

        return TensorBoard(run)
    if name == "mlflow":
        from dure.observe.loggers.mlflow import MLflow

        return MLflow(run)
    if name == "wandb":
        from dure.observe.loggers.wandb import WandB

        return WandB(run)
    from dure.observe.loggers.trackio import Trackio

    return Trackio(run)
