"""From the job to the command line that starts `dure` again, inside the job's image."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dure.base.errors import JobError
from dure.config import LoadedJob
from dure.image.choice import choose_runner
from dure.image.contents import PYTHON
from dure.image.environment import passed
from dure.image.mounts import innermost, make_written_folders, mounts_of, with_files
from dure.image.runner import ContainerSpec, apptainer_command, enroot_command, own_command


def image_of(loaded: LoadedJob) -> Path | None:
    """The job's image as an absolute path, or None when it has none; refuses one that is not there."""
    given = loaded.job.cluster.image
    if given is None:
        return None
    if not os.path.isabs(given) and "://" in loaded.storage:
        raise JobError(
            f"cluster.image is {given}, a path in the storage, but {loaded.storage} is no folder that can be mounted; "
            "give an absolute path to a copy on the nodes"
        )
    image = Path(os.path.normpath(os.path.join(loaded.storage, given)))
    if not image.is_file():
        raise JobError(
            f"cluster.image is {image}, and there is no such file; `dure image build -o {image}` makes one"
        )
    return image


def container_of(
    loaded: LoadedJob,
    image: Path,
    run_folder: Path,
    *,
    digest: str,
    job_file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    of_any_run: bool = False,
    extra: Sequence[Path] = (),
) -> ContainerSpec:
    """The job's image with its mounts and its environment, checked; nothing is touched.

    With `of_any_run`, `run_folder` is the folder that runs are made in. `extra` are files that must be there too.
    """
    mounts = with_files(mounts_of(loaded, run_folder, job_file, of_any_run=of_any_run), extra)
    here = os.getcwd()
    workdir = here if innermost(here, mounts) is not None else str(run_folder)
    return ContainerSpec(str(image), mounts, passed(environ, digest), workdir)


def command_inside(
    loaded: LoadedJob,
    run_folder: Path,
    arguments: Sequence[str],
    *,
    job_file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    of_any_run: bool = False,
    extra: Sequence[Path] = (),
) -> list[str]:
    """The command line that runs `dure ARGUMENTS…` in the job's image on this node.

    Everything that can be refused is refused here, before anything starts; then the folders that the run writes to are
    made. `arguments` should hold absolute paths. With `of_any_run`, `run_folder` is the folder that runs are made in.
    `extra` are files that must be there too.
    """
    image = image_of(loaded)
    if image is None:
        raise JobError("the job has no image; set cluster.image, or run it without one")
    chosen = choose_runner(loaded, image)
    place = container_of(
        loaded,
        image,
        run_folder,
        digest=chosen.digest,
        job_file=job_file,
        environ=environ,
        of_any_run=of_any_run,
        extra=extra,
    )
    command = [PYTHON, "-m", "dure", *arguments]
    if chosen.runner == "enroot":
        line = enroot_command(place, command)
    elif chosen.runner == "apptainer":
        gpus = os.path.exists("/dev/nvidiactl")
        line = apptainer_command(place, command, program=chosen.program, gpus=gpus)
    else:
        line = own_command(sys.executable, place, command, chosen.digest)
    make_written_folders(loaded, run_folder, place.mounts, of_any_run=of_any_run)
    return line
