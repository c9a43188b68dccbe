"""Where things are in a job's shared storage, and which of them a job may write.

/fsx/job/                    or s3://bucket/prefix
├── pytorch_squash.sqsh      the container image            read-only
├── ddp.py                   the training script            read-only
├── training_data/           the samples                    read-only
├── models/                  pretrained weights             read-only
└── checkpoints/             what a run saves               read-write
"""

from __future__ import annotations

from dataclasses import dataclass

from dure.base.errors import StorageError


@dataclass(frozen=True)
class Rights:
    """Which folders of a storage may be written."""

    folders: tuple[str, ...] | None = None
    """None: all of it; empty: nothing."""

    def writable(self, path: str) -> bool:
        """Whether a clean path may be written or removed; the writable folders themselves may not."""
        return self.folders is None or any(path.startswith(f"{folder}/") for folder in self.folders)

    def check(self, location: str, path: str) -> None:
        """Refuse to write or remove what is read-only."""
        if self.writable(path):
            return
        if not self.folders:
            raise StorageError(f"{location}: cannot write {path}: this storage was opened to read only")
        allowed = ", ".join(f"{folder}/" for folder in self.folders)
        raise StorageError(
            f"{location}: cannot write {path}: it is read-only; a job writes in {allowed} only"
        )


EVERYTHING = Rights(None)
NOTHING = Rights(())


@dataclass(frozen=True)
class Layout:
    """The names at the top of a job's shared storage."""

    image: str = "pytorch_squash.sqsh"
    script: str = "ddp.py"
    training_data: str = "training_data"
    models: str = "models"
    checkpoints: str = "checkpoints"

    @property
    def rights(self) -> Rights:
        """Only `checkpoints/` may be written."""
        return Rights((self.checkpoints,))

    def writable(self, path: str) -> bool:
        """Whether a job may write `path`."""
        return self.rights.writable(path)

    def read_only_names(self) -> tuple[str, ...]:
        """What a job only reads; what a container mounts read-only."""
        return (self.image, self.script, self.training_data, self.models)
