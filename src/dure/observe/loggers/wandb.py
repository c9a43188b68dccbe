"""Weights & Biases, offline: `wandb sync` brings it to a server. Each session has a file; all have one run's id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dure.observe.loggers.backend import Row, Run
from dure.observe.loggers.identity import Watermark, run_id


class WandB:
    """Never talks to a server: the mode is offline, whatever the environment says."""

    def __init__(self, run: Run) -> None:
        import wandb

        folder = run.folder / "wandb"
        folder.mkdir(exist_ok=True)
        self._watermark = Watermark(folder / "logged.json")
        self._run: Any = wandb.init(
            project=run.project,
            name=run.name,
            id=run_id(run.folder),
            resume="allow",
            mode="offline",
            dir=str(run.folder),
            config=dict(run.config),
            # Nothing of the process is to be watched or rewritten: its output is the launcher's.
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, x_disable_meta=True),
        )

    def logged(self) -> dict[str, int]:
        """As it was written down: what it has cannot be asked for."""
        return dict(self._watermark.last)

    def write(self, rows: Sequence[Row]) -> None:
        """A step's values become one row there."""
        self._watermark.raise_to(rows)
        for row in rows:
            self._run.log(dict(row.values), step=row.step)

    def close(self) -> None:
        """Finish the session's file."""
        self._run.finish()
