"""The doctor's part inside the job's image: what the ranks will see is what is looked at."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dure.base.errors import DureError
from dure.base.lines import Lines, decode, encode
from dure.base.run_folder import RunFolder
from dure.checkpoint.places import Places
from dure.config import LoadedJob
from dure.doctor.node import ENTERING, serve
from dure.image.enter import command_inside

_ORDER_SECONDS = 60.0


@dataclass(frozen=True)
class Order:
    """Which image a node's part is to go into, and with the mounts of which run."""

    loaded: LoadedJob
    job_file: Path
    run_folder: Path
    of_any_run: bool
    """Whether that is the folder that all runs are made in. Then it has to be there; else it is made, and removed."""

    def to_line(self) -> bytes:
        """As a message."""
        plain = {"job_file": str(self.job_file), "run_folder": str(self.run_folder)}
        return encode("Order", {"loaded": self.loaded.to_json(), **plain, "of_any_run": self.of_any_run})

    @classmethod
    def from_line(cls, line: bytes) -> Order:
        """The inverse of `to_line`."""
        _, raw = decode(line)
        loaded = LoadedJob.from_json(raw["loaded"])
        return cls(loaded, Path(raw["job_file"]), Path(raw["run_folder"]), raw["of_any_run"])


def serve_inside() -> int:
    """Read the order from standard input; start the doctor's part in the image, with the mounts that a run has.

    Where it cannot go in, it says why, and looks at what can be seen from outside.
    """
    # What follows the order is for the part inside.
    order = Order.from_line(Lines(0, None, byte_by_byte=True).next(_ORDER_SECONDS))
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
        sys.stdout.flush()
        os.write(1, encode(ENTERING))
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
