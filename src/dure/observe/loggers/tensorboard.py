"""TensorBoard: event files, one per session, which it shows as one run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from dure.observe.loggers.backend import Row, Run
from dure.observe.loggers.identity import last_steps


class TensorBoard:
    """Writes with torch's own writer."""

    def __init__(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard"
        self._logged = last_steps(_tags_and_steps(folder))
        self._writer = SummaryWriter(str(folder))

    def logged(self) -> dict[str, int]:
        """As the files of earlier sessions have it."""
        return self._logged

    def write(self, rows: Sequence[Row]) -> None:
        """One scalar for each value."""
        for row in rows:
            for name, value in row.values.items():
                self._writer.add_scalar(name, value, row.step, walltime=row.at)
        self._writer.flush()

    def close(self) -> None:
        """Flush, and end the writer's own thread."""
        self._writer.close()


def _tags_and_steps(folder: Path) -> Iterator[tuple[str, int]]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in EventFileLoader(str(path)).Load():  # ends at half a record that a kill left
            yield from ((value.tag, event.step) for value in event.summary.value)
