"""Hashes of raw bits: fast ones to compare replicas, sha256 for what must resist tampering."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
import xxhash

from dure.device.accelerator import is_host
from dure.device.hashing import digests


class _Hash(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...


def named_weights(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters and buffers, in name order."""
    named = [*module.named_parameters(), *module.named_buffers()]
    yield from sorted(named, key=lambda pair: pair[0])


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """The optimizer's state, in parameter order."""
    index = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
                yield f"{index}.{key}", tensor
            index += 1


def fingerprint(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """64 bits, as 16 hex digits, of names, types, shapes and raw bytes.

    What is on a device is hashed there, and does not cross over: the digits are others than for the same bytes in the
    host's memory.
    """
    digest = xxhash.xxh3_64()
    listed = list(named)
    there = [tensor for _, tensor in listed if not is_host(tensor.device)]
    if not there:
        _feed(digest, listed)
        return digest.hexdigest()
    found = iter(digests(there))
    for name, tensor in listed:
        digest.update(_head(name, tensor))
        digest.update(raw_bytes(tensor) if is_host(tensor.device) else next(found).to_bytes(8, "little"))
    return digest.hexdigest()


def weights_sha256(module: torch.nn.Module) -> str:
    """sha256 over all parameters and buffers in name order."""
    digest = hashlib.sha256()
    _feed(digest, named_weights(module))
    return digest.hexdigest()


def _feed(digest: _Hash, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in named:
        digest.update(_head(name, tensor))
        digest.update(raw_bytes(tensor))


def _head(name: str, tensor: torch.Tensor) -> bytes:
    return f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode()


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes; no copy for a contiguous tensor on the CPU."""
    if tensor.numel() == 0:
        return memoryview(b"")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
