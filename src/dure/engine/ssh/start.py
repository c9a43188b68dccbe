"""From the command line to a supervisor."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dure.base.errors import UsageError
from dure.config import LoadedJob
from dure.engine.ssh.supervisor import Supervisor, Wanted, known_hosts


def train_on_hosts(
    loaded: LoadedJob, job: Path, options: Sequence[str], run_dir: Path | None, *, fresh: bool
) -> None:
    """Train on the job's hosts; `options` are those that every agent is given as well."""
    cluster = loaded.job.cluster
    if run_dir is None and "://" in loaded.storage:
        raise UsageError(
            "the storage is a bucket: give --run-dir, a folder that all hosts see at the same path"
        )
    run = run_dir or loaded.run_in_storage(time.strftime("%Y%m%d-%H%M%S"))
    python = cluster.python or sys.executable
    wanted = Wanted(
        hosts=known_hosts(cluster.hosts, cluster.ssh),
        fewest=cluster.min_nodes or cluster.nodes,
        agent=(python, "-m", "dure", "train", str(job.absolute()), *options),
        first_time=("--fresh",) if fresh else (),
        run=str(run.absolute()),
        max_restarts=loaded.job.team.max_restarts,
        lost_seconds=cluster.lost_seconds,
    )
    Supervisor(wanted).run()
