"""What samples contain: a hash of each as it was read, taken on its way into a batch."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import xxhash

UNKNOWN = 0
"""Stands for a sample that was not read; no content has this hash."""


def content_of(sample: object) -> int:
    """64 bits of all tensors, arrays, numbers and texts in a sample; what is nothing of these counts by its type."""
    digest = xxhash.xxh3_64()
    _feed(digest, sample)
    return int(digest.intdigest()) or 1


def _feed(digest: Any, value: object) -> None:
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous()
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        if flat.numel():
            digest.update(flat.reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, bool | int | str):
        digest.update(f"{type(value).__name__} {value}".encode(errors="surrogatepass"))
    elif isinstance(value, float):
        digest.update(struct.pack("<d", value))
    elif isinstance(value, bytes | bytearray):
        digest.update(value)
    elif isinstance(value, list | tuple):
        digest.update(b"[%d" % len(value))
        for inner in value:
            _feed(digest, inner)
    elif isinstance(value, dict):
        digest.update(b"{%d" % len(value))
        for key in sorted(value, key=str):
            digest.update(str(key).encode())
            _feed(digest, value[key])
    elif isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        digest.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    else:
        digest.update(type(value).__name__.encode())


class WithContents:
    """A collate function that also tells what the samples contained: (contents, batch). Runs in loader workers."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> tuple[list[int], Any]:
        """Hash the samples before they are joined: a collate function may change them in place."""
        return [content_of(sample) for sample in samples], self._collate(samples)
