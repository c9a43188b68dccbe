"""The demo: 400 drawn photos, a small network that tells cats from the rest, and the job that trains it."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

from dure.base.errors import UsageError
from dure.base.files import write_whole
from dure.config import LoadedJob, load_job

HERE = Path(__file__).parent


def prepare(storage: Path, ranks: int) -> LoadedJob:
    """Lay out the shared storage as a cluster has it, draw the photos where they are missing; the job to run.

    training_data/, models/, checkpoints/ and ddp.py stand beside each other.
    """
    from dure.tools.demo.draw import draw_training_data

    job = load_job(HERE / "cats.toml", {"storage": json.dumps(str(storage.absolute()))}, ranks)
    with _refused_in_words(storage):
        for name in ("models", "checkpoints"):
            (storage / name).mkdir(parents=True, exist_ok=True)
        draw_training_data(storage / "training_data")
        script = (HERE / "ddp.py").read_bytes()
        if not (storage / "ddp.py").exists():
            write_whole(storage / "ddp.py", script)
    return job


def prepare_cluster(storage: Path) -> Path:
    """The same storage, and on it the same job for the documents' two nodes; returns the job file."""
    prepare(storage, ranks=4)
    job = (HERE / "cats.toml").read_text(encoding="utf-8")
    job = re.sub(r"^storage = .*$", 'storage = "."', job, flags=re.MULTILINE)
    path = storage / "cats.toml"
    with _refused_in_words(storage):
        write_whole(path, job + _CLUSTER)
    return path


@contextlib.contextmanager
def _refused_in_words(storage: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"cannot draw the demo's photos into {storage}: {reason}; give another folder: --storage DIR"
        ) from None


_CLUSTER = """
[cluster]
nodes = 2
hosts = ["10.0.1.10", "10.0.1.11"]   # the first leads
image = "pytorch_squash.sqsh"        # dure image build -o pytorch_squash.sqsh

# What is there inside the image; all of it refuses writes but checkpoints/.
[[cluster.mounts]]
source = "{storage}/cats.toml"

[[cluster.mounts]]
source = "{storage}/ddp.py"

[[cluster.mounts]]
source = "{storage}/training_data"

[[cluster.mounts]]
source = "{storage}/checkpoints"
writable = true
"""
