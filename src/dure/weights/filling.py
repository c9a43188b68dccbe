"""From windows of bytes into the model's tensors: copied, converted where types differ, and hashed while in cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy
import numpy.typing
import torch
import xxhash

from dure.device.accelerator import CPU, is_host
from dure.device.fingerprint import fingerprint, raw_bytes
from dure.device.pinned import to_device
from dure.storage.safetensors import TensorAt
from dure.weights.memory import FreshMemory
from dure.weights.windows import Window

Bytes = numpy.typing.NDArray[numpy.uint8]

CHUNK_BYTES = 512 * 1024
"""Fetched, copied and hashed at a time: small enough to stay in a core's cache."""


@dataclass
class Target:
    """One tensor of the model and what has come of it so far."""

    name: str
    """In the model."""
    tensor: torch.Tensor
    source: TensorAt
    fresh: FreshMemory | None = None
    digest: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)

    def __post_init__(self) -> None:
        tensor = self.tensor.detach()
        self._direct = tensor.is_contiguous() and is_host(tensor.device)
        # A tensor with strides of its own, or on a device, is put together beside it.
        self._whole = tensor if self._direct else torch.empty(tensor.shape, dtype=tensor.dtype)
        self._converts = self.source.dtype != tensor.dtype
        # numpy, as it takes slices ten times faster than torch, and lets other threads run while it copies.
        self._bytes = numpy.frombuffer(raw_bytes(self._whole), numpy.uint8)
        self._address = self._whole.data_ptr()
        self._left = self.source.nbytes

    def take(self, start: int, came: Bytes) -> None:
        """Take over the bytes of the source's tensor from `start` on."""
        itemsize, own = self.source.dtype.itemsize, self._whole.dtype.itemsize
        for at in range(0, len(came), CHUNK_BYTES):
            part = came[at : at + CHUNK_BYTES]
            first, count = (start + at) // itemsize, len(part) // itemsize
            into = self._bytes[first * own : (first + count) * own]
            if self.fresh is not None:
                self.fresh.fetch(self._address + first * own, len(into))
            if self._converts:
                # A view as another type must start at a multiple of its size; a copy does.
                values = torch.from_numpy(part.copy()).view(self.source.dtype)
                self._whole.view(-1)[first : first + count].copy_(values)
            else:
                numpy.copyto(into, part)
            self.digest.update(into.data)
        self._left -= len(came)
        if not self._left and not self._direct:
            self.tensor.detach().copy_(to_device(self._whole, self.tensor.device))


def fill(targets: Sequence[Target], window: Window, held: Bytes) -> None:
    """Hand a window's pieces to their tensors."""
    for piece in window.pieces:
        targets[piece.tensor].take(piece.start, held[piece.at : piece.at + piece.nbytes])


def fingerprint_of(targets: Iterable[Target], device: torch.device = CPU) -> str:
    """64 bits, as 16 hex digits: names, types, shapes and bytes of all tensors, in the order of their names.

    For a model that is for a device it is computed there, whichever way the bytes came.
    """
    if not is_host(device):
        listed = sorted(targets, key=lambda target: target.name)
        return fingerprint((one.name, to_device(one.tensor.detach(), device)) for one in listed)
    whole = xxhash.xxh3_64()
    for target in sorted(targets, key=lambda target: target.name):
        tensor = target.tensor
        line = f"{target.name} {tensor.dtype} {tuple(tensor.shape)} {target.digest.hexdigest()}\n"
        whole.update(line.encode())
    return whole.hexdigest()


def fingerprint_of_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """What `fingerprint_of` says of tensors that are there already."""
    whole = xxhash.xxh3_64()
    for name, tensor in sorted(named, key=lambda pair: pair[0]):
        digest = xxhash.xxh3_64(raw_bytes(tensor)).hexdigest()
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {digest}\n".encode())
    return whole.hexdigest()
