"""Trackio: a database on this machine, for `trackio show`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from dure.observe.loggers.backend import Row, Run
from dure.observe.loggers.identity import Watermark, run_id


class Trackio:
    """Logs into TRACKIO_DIR, or into a folder beside the other loggers."""

    def __init__(self, run: Run) -> None:
        folder = run.folder / "trackio"
        folder.mkdir(exist_ok=True)
        os.environ.setdefault("TRACKIO_DIR", str(folder.absolute()))  # read when it is imported
        import trackio

        self._watermark = Watermark(folder / "logged.json")
        self._run: Any = trackio.init(
            run.project,
            name=f"{run.name}-{run_id(run.folder)}",
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def logged(self) -> dict[str, int]:
        """As it was written down: what it has cannot be asked for."""
        return dict(self._watermark.last)

    def write(self, rows: Sequence[Row]) -> None:
        """One row for each step."""
        self._watermark.raise_to(rows)
        for row in rows:
            self._run.log(dict(row.values), step=row.step)

    def close(self) -> None:
        """Finish the run's session."""
        self._run.finish()
