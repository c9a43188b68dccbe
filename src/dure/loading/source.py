"""A source of weights: what its files hold, from their headers alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import torch

from dure.errors import WeightsError
from dure.loading.header import Readable, TensorAt, place, read_header

Kind = Literal["safetensors", "index", "huggingface", "pickled"]


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


def open_source(store: Readable, path: str) -> Source:
    """Read the headers of what is at `path`, and refuse what cannot be true."""
    if path.endswith(".safetensors"):
        size, tensors = read_header(store, path)
        return Source("safetensors", ((path, size),), tensors)
    raise WeightsError(
        f"{place(store, path)} is not something to load weights from; give a .safetensors file"
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
