"""The doctor's part inside the job's image: what the ranks will see is what is looked at."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dure.image.contents import PYTHON
from dure.image.digest import verified
from dure.image.environment import passed
from dure.image.mounts import make_written_folders, mounts_of
from dure.image.runner import Place, apptainer_command, enroot_command, own_command
from dure.job import LoadedJob

PART = ("-m", "dure", "doctor", "--serve")
"""The doctor's part on a node, as an interpreter's arguments."""


def order_of(loaded: LoadedJob, job_file: Path | None, run_folder: Path) -> str:
    """One line that tells a node's part which image to go into."""
    return json.dumps(
        {"loaded": loaded.to_json(), "job_file": job_file and str(job_file), "run_folder": str(run_folder)}
    )


def serve_inside() -> int:
    """Read the order from standard input; start the doctor's part in the image, with the mounts that a run has.

    The run's folder is a stand-in. It is made here, and removed when the last node is done.
    """
    order = json.loads(_line())
    loaded = LoadedJob.from_json(order["loaded"])
    job_file = Path(order["job_file"]) if order["job_file"] else None
    run_folder = Path(order["run_folder"])
    mounts = mounts_of(loaded, run_folder, job_file)
    make_written_folders(loaded, run_folder, mounts)
    try:
        image = image_of(loaded)
        digest = verified(image)
        place = Place(str(image), mounts, passed(os.environ, digest))
        line = command_inside(place, [PYTHON, *PART], loaded.job.cluster.runner, digest)
        return subprocess.run(line, check=False).returncode
    finally:
        for folder in (run_folder / "checkpoints", run_folder):
            with contextlib.suppress(OSError):  # another node is not done yet
                folder.rmdir()


def image_of(loaded: LoadedJob) -> Path:
    """The job's image: a path in the storage, or an absolute one."""
    assert loaded.job.cluster.image is not None
    return Path(os.path.normpath(os.path.join(loaded.storage, loaded.job.cluster.image)))


def command_inside(place: Place, command: Sequence[str], runner: str, digest: str) -> list[str]:
    """The command line that runs `command` in the image, with the runner that the job names or the node has.

    pyxis is a part of srun: where no srun starts us, the others do its work.
    """
    if runner in ("auto", "pyxis"):
        there = (name for name in ("enroot", "apptainer") if shutil.which(name) is not None)
        runner = next(there, "bubblewrap")
    if runner == "enroot":
        return enroot_command(place, command)
    if runner == "apptainer":
        return apptainer_command(place, command)
    return own_command(sys.executable, place, command, digest)


def _line() -> str:
    """One line, byte by byte: what follows it is for the part inside."""
    text = b""
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        text += byte
    return text.decode()
