"""The manifest: what a checkpoint is, and the size and hash of each of its files. Written last; without it, there
is no checkpoint.

Whoever can write to the storage can write a manifest that has the right hash: every number, name and type in it is
checked before it is used. What is accepted describes tensors that are there once, in files of the checkpoint's own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dure.base.errors import CheckpointError, StorageError
from dure.base.say import printable
from dure.checkpoint.state import FORMAT, Table
from dure.storage import Store

MANIFEST = "manifest.json"
BROKEN = "broken.json"
"""Beside the manifest of a checkpoint that was found damaged: why."""
PREFIX, SAVING = "step-", "saving-"
LONGEST = 64 << 20
_LONGEST_BROKEN = 64 << 10

Count = Annotated[int, Field(ge=0, le=1 << 53)]
Mark = Annotated[int, Field(ge=0, lt=1 << 64)]
Name = Annotated[str, Field(min_length=1, max_length=4096)]
Text = Annotated[str, Field(max_length=4096)]
Measures = dict[Name, float]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _File(_Strict):
    name: Annotated[str, Field(pattern=r"^part-[0-9]{1,6}-of-[0-9]{1,6}\.safetensors$")]
    bytes: Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    data: Count
    pieces: Annotated[list[tuple[Count, Count, Count]], Field(max_length=1 << 20)]


class _Model(_Strict):
    ties: dict[Name, Name]
    not_persistent: list[Name]


class _Optimizer(_Strict):
    kind: Name
    groups: list[dict[str, Any]]
    values: dict[str, dict[str, Any]]


class _Ledger(_Strict):
    under_way: tuple[bool, Count, Mark]
    epochs: Annotated[list[tuple[Count, Mark, Count]], Field(max_length=1 << 10)]
    evaluations: Annotated[list[tuple[Count, Mark, Count]], Field(max_length=1 << 10)]
    eval_samples: Count


class _Facts(_Strict):
    """What is used of the facts; others are for people."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    format: Annotated[int, Field(ge=1, le=FORMAT)]
    step: Count
    recipe_words: dict[str, Any]
    model: _Model
    optimizer: _Optimizer
    schedule: dict[str, Any] | None
    line: Text = ""
    saved_at: Text = ""
    epoch: Count | None = None
    loss: float | None = None
    metrics: Measures = {}
    judged: Measures = {}
    judged_after: Annotated[int, Field(ge=-1, le=1 << 53)] = -1
    ledger: _Ledger | None = None


class _Manifest(_Strict):
    facts: _Facts
    tensors: Annotated[
        list[
            tuple[Name, Name, Annotated[list[Annotated[int, Field(ge=0, le=1 << 48)]], Field(max_length=64)]]
        ],
        Field(max_length=1 << 20),
    ]
    files: Annotated[list[_File], Field(max_length=1 << 16)]
    sha256: str


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
        told = _read_json(content)
        try:
            digest = told.pop("sha256", None)
            # Byte for byte: a flipped bit that JSON would not mind is found too.
            if digest != hashlib.sha256(_dump(told)).hexdigest() or content != _dump(
                {**told, "sha256": digest}
            ):
                raise CheckpointError(f"its {MANIFEST} is damaged: it does not have the hash that it says")
            checked = _Manifest.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise CheckpointError(
                f"its {MANIFEST} cannot be right: {printable(where, 80)}: {printable(first['msg'], 120)}"
            ) from None
        except ValueError:  # a number with more digits than Python writes
            raise CheckpointError(f"its {MANIFEST} is damaged or cut short") from None
        table = Table.from_plain(checked.tensors)
        files = tuple(File(f.name, f.bytes, f.sha256, f.data, tuple(f.pieces)) for f in checked.files)
        _refuse_what_does_not_add_up(table, files)
        # A number may be too large to be a float, and is infinite then.
        floats = {name: getattr(checked.facts, name) for name in ("loss", "metrics", "judged")}
        facts = {name: floats.get(name, value) for name, value in told["facts"].items()}
        return cls(facts, table, files)


class NewerFormat(CheckpointError):
    """Written by a newer version, and so not damaged: it must not be set aside."""


def _read_json(content: bytes) -> dict[str, Any]:
    try:
        told = pydantic_core.from_json(content)  # refuses what is nested too deeply, instead of giving up
        written_by = told["facts"]["format"]
    except (ValueError, KeyError, TypeError, IndexError):
        raise CheckpointError(f"its {MANIFEST} is damaged or cut short") from None
    if not isinstance(told, dict) or not isinstance(told["facts"], dict):
        raise CheckpointError(f"its {MANIFEST} is damaged or cut short")
    if type(written_by) is int and written_by > FORMAT:
        raise NewerFormat(
            f"it has format {printable(str(written_by), 20)}, and this dure knows up to {FORMAT}; go on with the newer "
            "dure"
        )
    return told


def _refuse_what_does_not_add_up(table: Table, files: Sequence[File]) -> None:
    """Every element of every tensor must be in exactly one file, and nothing else; then no more memory is asked for
    than the files have bytes."""
    if len(table.by_name) != len(table.spans):
        raise CheckpointError(f"its {MANIFEST} cannot be right: a tensor is there twice")
    if len({file.name for file in files}) != len(files):
        raise CheckpointError(f"its {MANIFEST} cannot be right: a file is there twice")
    pieces: dict[int, list[tuple[int, int]]] = {}
    for file in files:
        nbytes = file.data
        for position, start, stop in file.pieces:
            if position >= len(table.spans) or not start < stop <= table.spans[position].numel:
                raise CheckpointError(f"its {MANIFEST} cannot be right: {file.name} has a piece of no tensor")
            nbytes += (stop - start) * table.spans[position].dtype.itemsize
            pieces.setdefault(position, []).append((start, stop))
        if nbytes != file.nbytes:
            raise CheckpointError(
                f"its {MANIFEST} cannot be right: the pieces of {file.name} are {nbytes:,} bytes of {file.nbytes:,}"
            )
    for position, span in enumerate(table.spans):
        end = 0
        for start, stop in sorted(pieces.get(position, [])):
            if start != end:
                break
            end = stop
        if end != span.numel or sum(stop - start for start, stop in pieces.get(position, [])) != end:
            raise CheckpointError(
                f"its {MANIFEST} cannot be right: {printable(span.name, 80)} is not there exactly once"
            )


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
        size = store.size(file)
        told = pydantic_core.from_json(store.read(file, 0, size)) if size <= _LONGEST_BROKEN else {}
        return printable(str(told["why"]))
    except (ValueError, KeyError, TypeError, IndexError, StorageError):
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


def remove_checkpoint(store: Store, name: str) -> None:
    """Remove a checkpoint so that it is whole or none, however far the removal comes."""
    if store.renames:
        store.rename_folder(name, f"{SAVING}{name}")
        store.remove_tree(f"{SAVING}{name}")
    else:
        store.remove(f"{name}/{MANIFEST}")
        store.remove_tree(name)


def remove_unfinished(store: Store) -> None:
    """Remove what was never finished, or not removed to its end; only while no save is under way."""
    for name in store.names(""):
        cut_short = name.startswith(PREFIX) and not store.renames and not store.exists(f"{name}/{MANIFEST}")
        if name.startswith(SAVING) or cut_short:
            store.remove_tree(name)


def _dump(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
