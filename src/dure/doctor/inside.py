"""The doctor's part inside the job's image: what the ranks will see is what is looked at."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dure.base.errors import DureError
from dure.base.run_folder import RunFolder
from dure.checkpoint.places import Places
from dure.config import LoadedJob
from dure.doctor.node import GOES_IN, serve
from dure.image.enter import command_inside


@dataclass(frozen=True)
class Order:
    """Which image a node's part is to go into, and with the mounts of which run."""

    loaded: LoadedJob
    job_file: Path
    run_folder: Path
    of_any_run: bool
    """Whether that is the folder that all runs are made in. Then it has to be there; else it is made, and removed."""

    def to_line(self) -> str:
        """As one line."""
        plain = {"job_file": str(self.job_file), "run_folder": str(self.run_folder)}
        return json.dumps({"loaded": self.loaded.to_json(), **plain, "of_any_run": self.of_any_run})

    @classmethod
    def from_line(cls, text: str) -> Order:
        """The inverse of `to_line`."""
        raw = json.loads(text)
        loaded = LoadedJob.from_json(raw["loaded"])
        return cls(loaded, Path(raw["job_file"]), Path(raw["run_folder"]), raw["of_any_run"])


def serve_inside() -> int:
    """Read the order from standard input; start the doctor's part in the image, with the mounts that a run has.

    Where it cannot go in, it says why, and looks at what can be seen from outside.
    """
    order = Order.from_line(_line())
    if order.of_any_run and not order.run_folder.is_dir():
        serve(f"{order.run_folder}, in which runs are made, is not there")  # to go in, it would be made
        return 0
    with _as_it_was(order):
        try:
            line = command_inside(
                order.loaded,
                order.run_folder,
                ["doctor", "--serve"],
                job_file=order.job_file,
                of_any_run=order.of_any_run,
            )
        except DureError as error:
            serve(str(error))
            return 0
        print(GOES_IN, flush=True)
        return subprocess.run(line, check=False).returncode


@contextlib.contextmanager
def _as_it_was(order: Order) -> Iterator[None]:
    """Remove the folders that were made for the mounts, at the end."""
    saves = Places.of_job(order.loaded, RunFolder(order.run_folder)).storage
    places = [order.run_folder, *([] if "://" in saves else [Path(saves)])]
    new = {folder for place in places for folder in (place, *place.parents) if not folder.exists()}
    try:
        yield
    finally:
        for folder in sorted(new, key=lambda folder: len(folder.parts), reverse=True):
            with contextlib.suppress(OSError):
                folder.rmdir()


def _line() -> str:
    """One line, byte by byte: what follows it is for the part inside."""
    text = b""
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        text += byte
    return text.decode()
