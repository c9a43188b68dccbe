"""What a job asks of its nodes: the one thing that every node is told."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dure.base.open_files import needed
from dure.config import LoadedJob
from dure.storage.layout import Layout

PORT = 29400
"""Where the leader listens unless it is told otherwise."""
_MIB = 1 << 20
_FILES_WITHOUT_JOB = 1024
_STATES = 4
"""A checkpoint holds weights and optimizer state, up to so many times the weights."""


@dataclass(frozen=True)
class JobNeeds:
    """What is checked on each node. Plain values only: it is sent to the nodes."""

    hosts: tuple[str, ...] = ()
    """The nodes, the leader first; empty: this machine alone."""
    ranks: int = 0
    """On each node; 0: not known."""
    threads: int = 1
    interface: str | None = None
    port: int = PORT
    storage: str | None = None
    """The shared storage, where it is a folder."""
    bucket: str | None = None
    """The shared storage, where it is a bucket."""
    needs: tuple[str, ...] = ()
    """What must be there to be read: paths, or places in a bucket."""
    refuses: tuple[str, ...] = ()
    """What must refuse to be written."""
    writable: str | None = None
    """The folder that runs write to."""
    made_by_run: bool = False
    """Whether a run makes that folder, if it is not there yet."""
    saves: str | None = None
    """Where checkpoints go, where that is a bucket."""
    files: Mapping[str, str] = field(default_factory=dict)
    """What must be the same bytes on every node: its name → its path, or a module's name."""
    free_bytes: int = 0
    """Space that must be free in `writable`."""
    shm_bytes: int = 0
    """Space that must be free in /dev/shm."""
    open_files: int = 0
    """How many files and connections a process may have open."""

    @property
    def several(self) -> bool:
        """Whether there is more than one node."""
        return len(self.hosts) > 1

    def to_json(self) -> dict[str, Any]:
        """The plan as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> JobNeeds:
        """The inverse of `to_json`."""
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()
        }
        return cls(**fields)


def needs_without_job(hosts: Sequence[str], interface: str | None = None, port: int = PORT) -> JobNeeds:
    """What every job asks of its nodes."""
    return JobNeeds(
        hosts=tuple(hosts),
        interface=interface,
        port=port,
        shm_bytes=_least_shared_memory(1),
        open_files=_FILES_WITHOUT_JOB,
    )


def needs_of(
    loaded: LoadedJob,
    job_file: Path | None = None,
    hosts: Sequence[str] = (),
    *,
    port: int = PORT,
    run_folder: Path | None = None,
    shared: bool = False,
    quick: bool = False,
) -> JobNeeds:
    """What this job asks of its nodes. `quick`: only what makes it fail for certain.

    `run_folder`: where the run will be, if that is known already; else in the storage, if it is `shared` with other
    machines, as it is on several nodes.
    """
    job = loaded.job
    shared = shared or len(hosts) > 1
    nodes = max(len(hosts), job.cluster.nodes) if len(hosts) > 1 else 1
    folder = None if "://" in loaded.storage else os.path.normpath(loaded.storage)
    # On one machine nobody else's data is at stake; on several the documents' picture is enforced.
    enforced = len(hosts) > 1 or job.cluster.image is not None
    weights = _weights_bytes(loaded)
    return JobNeeds(
        hosts=tuple(hosts),
        ranks=job.team.ranks,
        threads=job.team.threads,
        interface=job.cluster.interface,
        port=port,
        # A data factory may well make what is missing, folders too: only of several nodes is more known.
        storage=None if quick and len(hosts) < 2 and not loaded.job.model.weights else folder,
        # A server takes its time, and a run that cannot reach it says so itself.
        bucket=loaded.storage if folder is None and not quick else None,
        needs=_needed_paths(loaded, quick=quick),
        refuses=_read_only_paths(folder) if enforced and folder is not None else (),
        writable=_written_folder(loaded, folder, run_folder, shared=shared),
        # A shared folder for all runs that is missing on a node is one that is not mounted there.
        made_by_run=not shared or run_folder is not None,
        saves=None if quick else _saves_in_bucket(loaded),
        files=_same_files(loaded, job_file),
        free_bytes=max((32 if quick else 1024) * _MIB, weights * _STATES * (job.checkpoint.keep + 1)),
        shm_bytes=max(0 if quick else _least_shared_memory(job.team.ranks), weights * job.team.ranks),
        open_files=needed(job.team.ranks * nodes, job.team.ranks, nodes),
    )


def _least_shared_memory(ranks: int) -> int:
    """Gradients of all ranks lie there. Containers often come with 64 MiB, which no real model fits in."""
    return max(256 * _MIB, ranks * 64 * _MIB)


def _weights_bytes(loaded: LoadedJob) -> int:
    weights = loaded.job.model.weights
    if weights is None or "://" in weights or "://" in loaded.storage:
        return 0
    path = Path(loaded.storage, weights)
    try:
        if path.is_dir():
            return sum(part.stat().st_size for part in path.glob("*.safetensors"))
        return path.stat().st_size
    except OSError:
        return 0


def _needed_paths(loaded: LoadedJob, *, quick: bool) -> tuple[str, ...]:
    """What the job reads of the storage: weights, and what arguments of factories name.

    `quick`: not those, as a factory may make them; and nothing in a bucket.
    """
    job = loaded.job
    factories = () if quick else (job.model.args, job.data.args, job.eval.args)
    paths = [
        value.replace("{storage}", loaded.storage)
        for args in factories
        for value in args.values()
        if isinstance(value, str) and value.startswith("{storage}")
    ]
    if job.model.weights is not None:
        paths.append(_in_storage(loaded, job.model.weights))
    plain = [path.rstrip("/") if "://" in path else os.path.normpath(path) for path in paths]
    return tuple(dict.fromkeys(path for path in plain if not (quick and "://" in path)))


def _in_storage(loaded: LoadedJob, path: str) -> str:
    """A path that the job gives as one in its storage: a bucket's, or an absolute one."""
    if "://" in path or os.path.isabs(path):
        return path
    return f"{loaded.storage.rstrip('/')}/{path}"


def _read_only_paths(folder: str) -> tuple[str, ...]:
    return (folder, *(os.path.join(folder, name) for name in Layout().read_only_names()))


def _fixed_part(loaded: LoadedJob) -> str:
    """`checkpoint.folder`, up to what is named by the run."""
    asked = loaded.job.checkpoint.folder.replace("{storage}", loaded.storage)
    return asked if "{run}" not in asked else asked.partition("{run}")[0].rpartition("/")[0]


def _saves_in_bucket(loaded: LoadedJob) -> str | None:
    fixed = _fixed_part(loaded)
    return fixed if loaded.job.checkpoint.wanted and "://" in fixed else None


def _written_folder(
    loaded: LoadedJob, folder: str | None, run_folder: Path | None, *, shared: bool
) -> str | None:
    """Where checkpoints go: what `checkpoint.folder` says, else into the run; where it is shared, in the storage.

    None where it is not known: a run's folder is never in a bucket.
    """
    fixed = _fixed_part(loaded)
    if os.path.isabs(fixed):
        return os.path.normpath(fixed)
    if run_folder is not None:
        return str(run_folder.absolute())
    if shared:
        return None if folder is None else os.path.join(folder, Layout().checkpoints)
    return os.path.abspath("runs")


def _same_files(loaded: LoadedJob, job_file: Path | None) -> dict[str, str]:
    job = loaded.job
    files = {} if job_file is None else {"job file": str(job_file.absolute())}
    references = {
        "model.factory": job.model.factory,
        "data.factory": job.data.factory,
        "data.collate": job.data.collate,
        "eval.factory": job.eval.factory,
        "train.loss": job.train.loss,
    }
    for key, reference in references.items():
        if reference is not None and ":" in reference:
            place = reference.partition(":")[0]
            files[key] = os.path.normpath(loaded.folder / place) if place.endswith(".py") else place
    if "://" not in loaded.storage:
        script = os.path.join(os.path.normpath(loaded.storage), Layout().script)
        if os.path.exists(script):
            files["script"] = script
    if job.cluster.image is not None:
        files["image"] = os.path.normpath(_in_storage(loaded, job.cluster.image))
    return files
