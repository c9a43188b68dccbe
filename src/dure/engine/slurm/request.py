"""What is asked of Slurm: all that the batch script says, as one value."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dure.base.errors import UsageError
from dure.base.say import printable
from dure.config import LoadedJob

_TIME = re.compile(r"[0-9]{1,9}(:[0-9]{1,9}){0,2}|[0-9]{1,9}-[0-9]{1,9}(:[0-9]{1,9}){0,2}|UNLIMITED")
_OURS = {
    "array": "a run is one job; submit it once for each",
    "chdir": "the script starts where `dure submit` was called",
    "cpus-per-task": "set slurm.cpus_per_rank",
    "error": "the log has both streams",
    "job-name": "set the job's name",
    "no-kill": "set cluster.min_nodes",
    "no-requeue": "set slurm.requeues = 0",
    "nodes": "set cluster.nodes",
    "ntasks": "there is one task per node",
    "ntasks-per-node": "there is one task per node",
    "open-mode": "the log goes on when the job is queued again",
    "output": "give --run-dir, in which the log will be",
    "parsable": "`dure submit --json` says what came of it",
    "requeue": "set slurm.requeues",
    "signal": "set slurm.signal_seconds",
    "test-only": "use `dure submit --dry-run`",
    "wait": "use `dure status`",
    "wrap": "the script is the job",
}
"""Options of sbatch that the script depends on, and what to use instead."""
_SHORT = {
    **{"a": "array", "c": "cpus-per-task", "D": "chdir", "e": "error", "J": "job-name", "k": "no-kill"},
    **{"N": "nodes", "n": "ntasks", "o": "output", "W": "wait"},
}


@dataclass(frozen=True)
class Request:
    """One job of Slurm: one agent on each node, in one run."""

    name: str
    train: tuple[str, ...]
    """The command of one agent, without what depends on the node: interpreter, `train`, the job, its options."""
    runs: Path
    """Where the run's folder is made, as NAME-JOBID."""
    run: Path | None
    """The run's folder, where the user has named one."""
    work: Path
    """Where the command is started."""
    nodes: int
    min_nodes: int
    ranks: int
    cpus_per_node: int
    gpus_per_node: int = 0
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    signal_seconds: int = 120
    wait_seconds: int = 120
    """For the other agents, once the first has ended; the leader's reads all that the ranks recorded."""
    requeues: int = 10
    resumable: bool = True
    """Whether the run saves; one that does not is never queued again."""
    options: tuple[str, ...] = ()
    """Further options of sbatch."""
    srun_options: tuple[str, ...] = ()
    """Further options of srun: an image that Slurm itself runs (pyxis). Into any other, `dure train` goes by itself."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise UsageError(f"the job's name is {self.name!r}; use letters, digits, points, _ and -")

    @property
    def logs(self) -> Path:
        """The folder of Slurm's log, which must be there before the job starts."""
        return (self.run or self.runs) / "slurm"

    def log(self, job_id: int) -> Path:
        """All that the job printed, in all its attempts."""
        return self.logs / f"{self.name}-{job_id}.log"

    def run_of(self, job_id: int) -> Path:
        """The run's folder, which stays the same when the job is queued again."""
        return self.run or self.runs / f"{self.name}-{job_id}"


def request_for(
    loaded: LoadedJob,
    train: Sequence[str],
    *,
    run_dir: Path | None,
    work: Path,
    srun_options: Sequence[str] = (),
) -> Request:
    """What a job asks of Slurm. `train` is the agent's command up to its own options."""
    job = loaded.job
    if run_dir is None and "://" in loaded.storage:
        raise UsageError(
            f"the job's storage is {loaded.storage}, and a run keeps its files in a folder that all nodes see; give "
            "one with --run-dir"
        )
    for option in job.slurm.options:
        _check_option(option)
    time = None if job.slurm.time is None else str(job.slurm.time)
    if time is not None and not _TIME.fullmatch(time):
        raise UsageError(
            f"slurm.time is {printable(repr(time), 40)}; write it as sbatch does: minutes, or hours:minutes:seconds, "
            "or days-hours:minutes:seconds, as in 2-00:00:00"
        )
    limit = None if time is None else _seconds(time)
    if limit is not None and job.slurm.signal_seconds >= limit:
        raise UsageError(
            f"slurm.signal_seconds is {job.slurm.signal_seconds}, and slurm.time, {time}, is {limit} s: the run would "
            "be told to save as soon as it starts; give it more time, or a later signal"
        )
    return Request(
        name=job.name,
        train=tuple(train),
        runs=Path(loaded.storage) / "checkpoints" if run_dir is None else run_dir.absolute().parent,
        run=None if run_dir is None else run_dir.absolute(),
        work=work,
        nodes=job.cluster.nodes,
        min_nodes=job.cluster.min_nodes or job.cluster.nodes,
        ranks=job.team.ranks,
        cpus_per_node=job.team.ranks * (job.slurm.cpus_per_rank or job.team.threads),
        gpus_per_node=job.slurm.gpus_per_node,
        partition=job.slurm.partition,
        account=job.slurm.account,
        time=time,
        signal_seconds=job.slurm.signal_seconds,
        requeues=job.slurm.requeues,
        resumable=job.resumable,
        options=job.slurm.options,
        srun_options=tuple(srun_options),
    )


def _seconds(time: str) -> int | None:
    """How long a time limit is: minutes, minutes:seconds, hours:minutes:seconds, or with days- before hours."""
    if time == "UNLIMITED":
        return None
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))


def _check_option(option: str) -> None:
    if not re.match(r"--[a-z]|-[A-Za-z]", option):
        raise UsageError(
            f"slurm.options has {option!r}, which is no option of sbatch; write each as one string, with its value, "
            "as in --constraint=g5"
        )
    name = option[2:].partition("=")[0] if option.startswith("--") else _SHORT.get(option[1], option[1])
    if " " in name:
        raise UsageError(
            f"slurm.options has {option!r}; put = between an option and its value, as in --constraint=g5"
        )
    for ours, instead in _OURS.items():
        if ours.startswith(name):  # sbatch takes an option's first letters for the whole of it
            raise UsageError(
                f"slurm.options has {option!r}, which the batch script decides itself; {instead}"
            )
