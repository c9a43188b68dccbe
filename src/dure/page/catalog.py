"""Which runs there are: one that was named, those beside it, or the newest of a folder."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

from dure.base.errors import UsageError
from dure.page.run import RunView

_MOST_OPEN = 8
_MOST_LISTED = 500


class Catalog:
    """Runs by the names of their folders, all in one folder; nothing else can be asked for."""

    def __init__(self, folder: Path, newest: str) -> None:
        self.folder, self.newest = folder, newest
        """The run that is shown first."""
        self._open: OrderedDict[str, RunView] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def of(cls, wanted: Path | None) -> Catalog:
        """Of a run's folder, of a folder of runs, or of `runs/`; UsageError when there is none."""
        path = (wanted or Path("runs")).absolute()
        if is_run(path):
            return cls(path.parent, path.name)
        names = runs_in(path)
        if not names:
            told = "there is no such folder" if not path.is_dir() else "there is no run in it"
            raise UsageError(f"{wanted or path}: {told}; name a run's folder, or train one: dure demo")
        return cls(path, names[0])

    def listing(self) -> list[dict[str, Any]]:
        """All runs, newest first."""
        names = runs_in(self.folder)
        if self.newest not in names:
            names.insert(0, self.newest)
        return [{"id": name} for name in names[:_MOST_LISTED]]

    def run(self, name: str | None) -> RunView:
        """One of them; KeyError for what is not listed."""
        name = name or self.newest
        with self._lock:
            if name in self._open:
                self._open.move_to_end(name)
                return self._open[name]
            if name != self.newest and name not in runs_in(self.folder):
                raise KeyError(name)
            view = self._open[name] = RunView(self.folder / name)
            while len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)[1].close()
            return view

    def close(self) -> None:
        """Let go of all runs."""
        with self._lock:
            for view in self._open.values():
                view.close()
            self._open.clear()


def is_run(path: Path) -> bool:
    """Whether a folder looks like a run's."""
    return (path / "job.json").is_file() or (path / "events").is_dir()


def runs_in(folder: Path) -> list[str]:
    """The names of the runs in a folder, the one with the youngest events first; links are left out."""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False) and is_run(Path(entry.path)):
                found.append((_touched(Path(entry.path)), entry.name))
    return [name for _, name in sorted(found, reverse=True)]


def _touched(run: Path) -> float:
    newest = 0.0
    for path in (run / "job.json", run / "events", run / "events" / "rank-0.jsonl", run / "summary.json"):
        with contextlib.suppress(OSError):
            newest = max(newest, path.stat().st_mtime)
    return newest
