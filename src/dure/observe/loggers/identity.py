"""A run's id for loggers, and the last step of each metric that was logged: both survive a restart."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from pathlib import Path

from dure.base.files import write_whole
from dure.observe.loggers.backend import Row


def run_id(folder: Path) -> str:
    """The id of the run whose loggers have this folder; made when there is none."""
    path = folder / "id.json"
    try:
        found = json.loads(path.read_bytes())["id"]
        if isinstance(found, str) and found.isalnum() and len(found) <= 64:
            return found
    except (OSError, ValueError, KeyError, TypeError):
        pass
    made = secrets.token_hex(8)
    write_whole(path, json.dumps({"id": made}).encode())
    return made


def last_steps(found: Iterable[tuple[str, int]]) -> dict[str, int]:
    """The largest step of each name."""
    last: dict[str, int] = {}
    for name, step in found:
        last[name] = max(step, last.get(name, -1))
    return last


class Watermark:
    """For loggers that cannot be asked what they have: the last step of each metric, written down before it is logged.

    So no step is logged twice. A process that is killed between the two loses those few.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.last: dict[str, int] = {}
        try:
            found = json.loads(path.read_bytes())
            self.last = {str(name): int(step) for name, step in found.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            pass

    def raise_to(self, rows: Iterable[Row]) -> None:
        """These are about to be logged."""
        raised = last_steps([*self.last.items(), *((name, row.step) for row in rows for name in row.values)])
        self.last = raised
        write_whole(self._path, json.dumps(raised).encode())
