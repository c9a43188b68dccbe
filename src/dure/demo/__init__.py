"""The demo: 400 drawn photos, a small network that tells cats from the rest, and the job that trains it."""

from __future__ import annotations

from pathlib import Path

from dure.files import write_whole
from dure.job import LoadedJob, load_job

HERE = Path(__file__).parent


def prepare(storage: Path, ranks: int) -> LoadedJob:
    """Lay out the shared storage as a cluster has it, draw the photos where they are missing; the job to run.

    training_data/, models/, checkpoints/ and ddp.py stand beside each other.
    """
    from dure.demo.draw import draw_training_data

    job = load_job(HERE / "cats.toml", {"storage": str(storage.absolute())}, ranks)
    for name in ("models", "checkpoints"):
        (storage / name).mkdir(parents=True, exist_ok=True)
    draw_training_data(storage / "training_data")
    script = (HERE / "ddp.py").read_bytes()
    if not (storage / "ddp.py").exists():
        write_whole(storage / "ddp.py", script)
    return job
