"""The manifest: what a checkpoint is, and the size and hash of each of its files. Written last; without it, there
is no checkpoint."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from dure.checkpoint.state import FORMAT
from dure.checkpoint.table import Table
from dure.errors import CheckpointError, StorageError
from dure.storage import Store

MANIFEST = "manifest.json"
BROKEN = "broken.json"
"""Beside the manifest of a checkpoint that was found damaged: why."""
PREFIX, SAVING = "step-", "saving-"
LONGEST = 256 << 20


@dataclass(frozen=True)
class File:
    """One rank's share: a plain safetensors file."""

    name: str
    nbytes: int
    sha256: str
    data: int
    """Where the header ends."""
    pieces: tuple[tuple[int, int, int], ...]
    """(position of the tensor in the table, first element, end), in the order of the file's bytes."""


@dataclass(frozen=True)
class Manifest:
    """A checkpoint without its tensors' bytes."""

    facts: dict[str, Any]
    table: Table
    files: tuple[File, ...]

    @property
    def step(self) -> int:
        """The next one to do: so many are done."""
        return int(self.facts["step"])

    @property
    def nbytes(self) -> int:
        """Of all files, without the manifest."""
        return sum(file.nbytes for file in self.files)

    def to_bytes(self) -> bytes:
        """As the file has it; its own hash is in it."""
        body = {
            "facts": self.facts,
            "tensors": self.table.to_plain(),
            "files": [
                {"name": f.name, "bytes": f.nbytes, "sha256": f.sha256, "data": f.data, "pieces": f.pieces}
                for f in self.files
            ],
        }
        digest = hashlib.sha256(_dump(body)).hexdigest()
        return _dump({**body, "sha256": digest})

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """What `to_bytes` gave, or a CheckpointError that says what is wrong with it."""
        try:
            told = json.loads(content)
            written_by = told["facts"]["format"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise CheckpointError(f"its {MANIFEST} is damaged or cut short") from None
        if type(written_by) is int and written_by > FORMAT:
            raise NewerFormat(
                f"it has format {written_by}, and this dure knows up to {FORMAT}; go on with the newer dure"
            )
        digest = told.pop("sha256", None)
        # Byte for byte: a flipped bit that JSON would not mind is found too.
        if digest != hashlib.sha256(_dump(told)).hexdigest() or content != _dump({**told, "sha256": digest}):
            raise CheckpointError(f"its {MANIFEST} is damaged: it does not have the hash that it says")
        files = tuple(
            File(f["name"], f["bytes"], f["sha256"], f["data"], tuple((a, b, c) for a, b, c in f["pieces"]))
            for f in told["files"]
        )
        return cls(told["facts"], Table.from_plain(told["tensors"]), files)


class NewerFormat(CheckpointError):
    """Written by a newer version, and so not damaged: it must not be set aside."""


def read_manifest(store: Store, path: str) -> Manifest:
    """The manifest of the checkpoint at `path`; StorageError only when the storage itself does not answer."""
    file = f"{path}/{MANIFEST}"
    if not store.exists(file):
        raise CheckpointError(f"it has no {MANIFEST}: it was never finished")
    size = store.size(file)
    if size > LONGEST:
        raise CheckpointError(f"its {MANIFEST} is damaged: {size:,} bytes long")
    return Manifest.from_bytes(store.read(file, 0, size))


def why_broken(store: Store, path: str) -> str | None:
    """What an earlier look found wrong with it."""
    file = f"{path}/{BROKEN}"
    if not store.exists(file):
        return None
    try:
        return str(json.loads(store.read(file, 0, store.size(file)))["why"])
    except (ValueError, KeyError, TypeError, StorageError):
        return "it was set aside"


def set_aside(store: Store, path: str, why: str) -> None:
    """Mark a damaged checkpoint, so that nobody tries it again. Nothing is removed."""
    store.write_whole(f"{path}/{BROKEN}", [json.dumps({"why": why}).encode()])


def check_files(store: Store, path: str, manifest: Manifest) -> None:
    """A first look, at sizes only: CheckpointError when a file is not there or has another length."""
    for file in manifest.files:
        if not store.exists(f"{path}/{file.name}"):
            raise CheckpointError(f"its {file.name} is missing")
        size = store.size(f"{path}/{file.name}")
        if size != file.nbytes:
            raise CheckpointError(f"its {file.name} has {size:,} bytes instead of {file.nbytes:,}")


def _dump(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
