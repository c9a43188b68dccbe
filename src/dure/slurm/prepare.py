"""From the command line of `dure submit` to a request: the same command on every node."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from dure.job import LoadedJob
from dure.slurm.request import Request, request_for


def prepare(
    loaded: LoadedJob, job: Path, settings: Sequence[str], ranks: int | None, run_dir: Path | None
) -> Request:
    """What `dure submit JOB` asks of Slurm, with the options that it was given."""
    # This interpreter, by its path: what a login shell would find on a node may be another one.
    interpreter = [sys.executable, "-m", "dure"]
    options = [f"--set={setting}" for setting in settings]
    if ranks is not None:
        options.append(f"--ranks={ranks}")
    return request_for(
        loaded,
        [*interpreter, "train", str(job.absolute()), *options],
        run_dir=run_dir,
        work=Path.cwd(),
    )
