"""Hashes of raw bits: fast ones to compare replicas, sha256 for what must resist tampering."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
import xxhash


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
    """64 bits, as 16 hex digits, of names, types, shapes and raw bytes."""
    digest = xxhash.xxh3_64()
    _feed(digest, named)
    return digest.hexdigest()


def weights_sha256(module: torch.nn.Module) -> str:
    """sha256 over all parameters and buffers in name order."""
    digest = hashlib.sha256()
    _feed(digest, named_weights(module))
    return digest.hexdigest()


def _feed(digest: _Hash, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in named:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(raw_bytes(tensor))


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes; no copy for a contiguous tensor on the CPU."""
    if tensor.numel() == 0:
        return memoryview(b"")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
