"""From the command line of `dure submit` to a request: the same command on every node."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from dure.base.errors import DureError
from dure.config import LoadedJob
from dure.engine.slurm import queue
from dure.engine.slurm.quoting import variable
from dure.engine.slurm.request import Request, request_for
from dure.image.contents import PYTHON
from dure.image.digest import digest_of, recorded
from dure.image.enter import container_of, image_of
from dure.image.runner import pyxis_options


def prepare(
    loaded: LoadedJob, job: Path, settings: Sequence[str], ranks: int | None, run_dir: Path | None
) -> Request:
    """What `dure submit JOB` asks of Slurm, with the options that it was given."""
    job = job.absolute()
    by_slurm = slurm_runs_the_image(loaded)
    # This interpreter, by its path: what a login shell would find on a node may be another one.
    interpreter = PYTHON if by_slurm else sys.executable
    options = [f"--set={setting}" for setting in settings]
    if ranks is not None:
        options.append(f"--ranks={ranks}")
    return request_for(
        loaded,
        [interpreter, "-m", "dure", "train", str(job), *options],
        run_dir=run_dir,
        work=Path.cwd(),
        srun_options=_pyxis(loaded, job, run_dir) if by_slurm else (),
    )


def slurm_runs_the_image(loaded: LoadedJob) -> bool:
    """Whether srun is told of the image; any other runner is started on each node, by `dure train` itself."""
    cluster = loaded.job.cluster
    if cluster.image is None or cluster.runner not in ("pyxis", "auto"):
        return False
    return cluster.runner == "pyxis" or _has_pyxis()


def _has_pyxis() -> bool:
    """Whether the srun that is here has the options that pyxis adds."""
    try:
        return "--container-image" in queue.call(["srun", "--help"]).stdout
    except DureError:  # there is none, or it hangs
        return False


def _pyxis(loaded: LoadedJob, job: Path, run_dir: Path | None) -> list[str]:
    """The options of srun that run the job's image; all that is wrong with its mounts is refused here."""
    # The run's folder is mounted, and is named by a number that only the script will know.
    number = uuid.uuid4().hex
    run = run_dir or loaded.run_in_storage(number)
    options = pyxis_with(loaded, job, run.absolute())
    return [option.replace(number, variable("job")) for option in options]


def pyxis_with(loaded: LoadedJob, job: Path, run: Path, *, of_any_run: bool = False) -> list[str]:
    """The options of srun that run the job's image with the mounts of a run in this folder.

    With `of_any_run`, `run` is the folder that runs are made in.
    """
    image = image_of(loaded)
    assert image is not None
    digest = recorded(image) or digest_of(image)
    place = container_of(loaded, image, run, digest=digest, job_file=job, environ={}, of_any_run=of_any_run)
    return pyxis_options(place)
