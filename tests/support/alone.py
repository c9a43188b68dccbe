"""A job on one rank, in the test's own process: what the runs of many ranks are compared with."""

from dure.base.run_folder import RunFolder
from dure.config import load_job


def train_alone(job, folder, settings=None):
    """Train a job as a team of one; returns the rank's result. Nothing is launched, which saves the start."""
    from dure.train import run_rank

    loaded = load_job(job, {"data.workers": "0", **(settings or {})}, ranks=1, nodes="1")
    run = RunFolder(folder)
    run.create()
    return run_rank(loaded.to_json(), str(run.path))
