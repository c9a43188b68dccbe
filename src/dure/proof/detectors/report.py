"""How a mistake is told: once per run and kind, a line on stderr and a line in the run's folder."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from dure.base.errors import DureError
from dure.base.files import open_own
from dure.base.run_folder import RunFolder
from dure.base.say import say

_NOT_THE_SCRIPT = (
    str(Path(__file__).parents[2]),
    str(Path(torch.__file__).parent.parent),
    sysconfig.get_paths()["stdlib"],
    "<",
)


@dataclass(frozen=True)
class Report:
    """One mistake."""

    text: str
    """What is wrong, on which ranks, and the way out."""
    kind: str
    """A word for machines, such as `set-epoch`."""
    place: str = ""
    """`file:line` of the script."""

    @property
    def line(self) -> str:
        """For people."""
        return f"{self.text} (at {self.place})" if self.place else self.text


class Reporter:
    """Tells each kind of mistake once."""

    def __init__(self, folder: RunFolder | None, *, strict: bool) -> None:
        self._folder, self._strict = folder, strict

    def tell(self, report: Report, rank: int) -> None:
        """Say it and write it down; with `strict` it is an error of this rank."""
        if self._folder is not None:
            line = {"kind": report.kind, "text": report.text, "place": report.place, "rank": rank}
            with contextlib.suppress(OSError):  # it was said; the folder may be gone
                descriptor = open_own(self._folder.mistakes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                with open(descriptor, "a") as file:
                    file.write(json.dumps({**line, "time": round(time.time(), 3)}) + "\n")
        if self._strict:
            raise DureError(f"{report.line}; --watch warn goes on")
        say(report.line)


def script_place() -> str:
    """`file:line` of the innermost frame that is neither dure's, nor an installed package's, nor Python's own."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_NOT_THE_SCRIPT):
            with contextlib.suppress(ValueError, OSError):
                name = str(Path(name).relative_to(Path.cwd()))
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
