"""A source of weights: what its files hold, from their headers alone."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from dure.base.errors import WeightsError
from dure.storage import Store
from dure.storage.safetensors import LONGEST_HEADER, STRICT_JSON, TensorAt, place, read_header, said
from dure.weights.pickled import NO_PLACE, read_pickled

Kind = Literal["safetensors", "index", "huggingface", "pickled"]

IN_A_FOLDER = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""What a folder's weights are called, the preferred first, as `from_pretrained` has it."""

_READERS = (".safetensors", ".pth", ".pt", ".bin")


@dataclass(frozen=True)
class Source:
    """Everything that loading needs to know, without a byte of the weights themselves."""

    kind: Kind
    files: tuple[tuple[str, int], ...]
    """Path in the storage, and size in bytes."""
    tensors: tuple[TensorAt, ...]
    """File by file, in the order of their bytes."""
    config: dict[str, Any] | None = None
    """A Hugging Face folder's config.json."""

    @property
    def sliceable(self) -> bool:
        """Whether every tensor is a range of bytes; else only `pickled.load_pickled` can read the files."""
        return all(tensor.start != NO_PLACE for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def to_json(self) -> str:
        """As text, for the other ranks."""
        places = {path: place for place, (path, _) in enumerate(self.files)}
        return json.dumps(
            {
                "kind": self.kind,
                "files": self.files,
                "tensors": [
                    (t.name, _dtype_name(t.dtype), t.shape, places[t.file], t.start, t.nbytes)
                    for t in self.tensors
                ],
                "config": self.config,
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> Source:
        """What `to_json` wrote."""
        told = json.loads(text)
        files = tuple((path, size) for path, size in told["files"])
        tensors = tuple(
            TensorAt(name, getattr(torch, dtype), tuple(shape), files[place][0], start, nbytes)
            for name, dtype, shape, place, start, nbytes in told["tensors"]
        )
        return cls(told["kind"], files, tensors, told["config"])


def open_source(store: Store, path: str) -> Source:
    """Read the headers of what is at `path`, and refuse what cannot be true.

    A .safetensors file, an index of several (….index.json), a .pth, .pt or .bin file, or a folder as Hugging Face
    lays it out.
    """
    path = path.strip("/")
    if path.endswith(".index.json"):
        return _open_index(store, path)
    if path.endswith(_READERS):
        size, tensors = _read_file(store, path)
        return Source("safetensors" if path.endswith(".safetensors") else "pickled", ((path, size),), tensors)
    return _open_folder(store, "" if path == "." else path)


def _read_file(store: Store, path: str) -> tuple[int, tuple[TensorAt, ...]]:
    return (read_header if path.endswith(".safetensors") else read_pickled)(store, path)


def _open_folder(store: Store, folder: str) -> Source:
    names = store.names(folder)
    called = place(store, folder)
    chosen = next((name for name in IN_A_FOLDER if name in names), None)
    if chosen is None:
        others = ", ".join(said(name) for name in sorted(names) if name.endswith((*_READERS, ".index.json")))
        raise WeightsError(
            f"{called} is no file of weights (.safetensors, .index.json, .pth, .pt, .bin), and as a folder it has none "
            f"of {', '.join(IN_A_FOLDER)}" + (f"; it has {others}: name one" if others else "")
        )
    weights = open_source(store, _join(folder, chosen))
    if "config.json" not in names:
        return weights
    config = _read_json(store, _join(folder, "config.json"))
    return replace(weights, kind="huggingface", config=config)


def _open_index(store: Store, path: str) -> Source:
    """Several files, and a table that says which tensor is in which."""
    called, folder = place(store, path), path.rpartition("/")[0]
    table = _read_json(store, path).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise WeightsError(f"{called} has no weight_map that says which file each tensor is in")
    told: dict[str, set[str]] = {}
    for name, file in table.items():
        if (
            not isinstance(file, str)
            or not file.isprintable()
            or set(file) & set("/\\")
            or file.startswith(".")
        ):
            raise WeightsError(
                f"{called} has {said(name)} in {said(str(file))}, which is not a file beside it; "
                "an index may only name files of its own folder"
            )
        if not file.endswith(_READERS):
            raise WeightsError(f"{called} has {said(name)} in {said(file)}, which is not a file of weights")
        told.setdefault(file, set()).add(name)
    files: list[tuple[str, int]] = []
    tensors: list[TensorAt] = []
    for file in sorted(told):
        if not store.exists(_join(folder, file)):
            raise WeightsError(
                f"{called} names {said(file)}, which is not there; copy all files of the model"
            )
        size, inside = _read_file(store, _join(folder, file))
        _refuse_other_names(told[file], {tensor.name for tensor in inside}, file, called)
        files.append((_join(folder, file), size))
        tensors.extend(inside)
    return Source("index", tuple(files), tuple(tensors))


def _refuse_other_names(told: set[str], inside: set[str], file: str, index: str) -> None:
    for names, what in ((told - inside, "that it does not have"), (inside - told, "less than it has")):
        if names:
            few = ", ".join(said(name) for name in sorted(names)[:5]) + (" …" if len(names) > 5 else "")
            raise WeightsError(
                f"{index} says of {said(file)} {len(names)} tensor(s) {what}: {few}; "
                "the index and the file are not of one model, or one of them is old"
            )


def _read_json(store: Store, path: str) -> dict[str, Any]:
    called, size = place(store, path), store.size(path)
    if size > LONGEST_HEADER:
        raise WeightsError(f"{called} is {size:,} bytes long; such a file has {LONGEST_HEADER:,} at most")
    try:
        value = STRICT_JSON.decode(store.read(path, 0, size).decode())
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{called} is not valid JSON ({said(str(error))}); get the file again") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{called} is a JSON {type(value).__name__}, not an object; get the file again")
    return value


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
