"""The doctor's part inside the job's image: what the ranks will see is what is looked at."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path

from dure.image.enter import command_inside
from dure.job import LoadedJob


def order_of(loaded: LoadedJob, job_file: Path, run_folder: Path) -> str:
    """One line that tells a node's part which image to go into."""
    return json.dumps({"loaded": loaded.to_json(), "job_file": str(job_file), "run_folder": str(run_folder)})


def serve_inside() -> int:
    """Read the order from standard input; start the doctor's part in the image, with the mounts that a run has.

    The run's folder is a stand-in. It is made here, and removed when the last node is done.
    """
    order = json.loads(_line())
    loaded, run_folder = LoadedJob.from_json(order["loaded"]), Path(order["run_folder"])
    try:
        line = command_inside(loaded, run_folder, ["doctor", "--serve"], job_file=Path(order["job_file"]))
        return subprocess.run(line, check=False).returncode
    finally:
        for folder in (run_folder / "checkpoints", run_folder):
            with contextlib.suppress(OSError):  # another node is not done yet
                folder.rmdir()


def _line() -> str:
    """One line, byte by byte: what follows it is for the part inside."""
    text = b""
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        text += byte
    return text.decode()
