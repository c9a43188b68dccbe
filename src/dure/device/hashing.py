"""Fingerprints computed where the tensors are: 64 bits each, one short copy to the host for many tensors.

Each word of the bytes is multiplied by an odd number that its place gives, and all are added, modulo 2**64. That is the
same in whatever order a device adds, any single changed word shows, and words that change places do. It is no hash for
what must resist tampering.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from dure.device.accelerator import is_host, wait_for

_WORDS = 1 << 20
"""That are multiplied at once."""
_ODD = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9)
_MASK = (1 << 64) - 1
_WORD_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Of each tensor's elements, in their logical order. The host waits once per device."""
    found = [digest(tensor) for tensor in tensors]
    devices = {one.device for one in found}
    told: dict[int, int] = {}
    for device in devices:
        places = [at for at, one in enumerate(found) if one.device == device]
        numbers = torch.stack([found[at] for at in places]).cpu().tolist()
        told.update(zip(places, numbers, strict=True))
    return [told[at] & _MASK for at in range(len(found))]


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """One int64, where the tensor is; nobody waits."""
    words = _words(tensor.detach())
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    keys = _keys(tensor.device, min(_WORDS, 1 << max(words.numel() - 1, 1).bit_length()))
    for chunk in range(-(-words.numel() // _WORDS)):
        part = words[chunk * _WORDS : (chunk + 1) * _WORDS].to(torch.int64)
        total += (part * keys[: part.numel()]).sum() * _odd(chunk)
    return total


def on_devices(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether any of them is not in the host's memory."""
    return any(not is_host(tensor.device) for tensor in tensors)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.contiguous().view(-1)
    return flat.view(_WORD_OF[flat.element_size()])


@functools.lru_cache(maxsize=64)
def _keys(device: torch.device, count: int) -> torch.Tensor:
    """An odd number for each place, whatever their count. Of int64, whose products are modulo 2**64."""
    at = torch.arange(count, dtype=torch.int64, device=device)
    mixed = (at + 1) * _signed(_ODD[0])
    mixed = (mixed ^ (mixed >> 29)) * _signed(_ODD[1])
    keys = (mixed ^ (mixed >> 32)) | 1
    wait_for(device)  # they are kept, and used in whatever stream
    return keys


def _odd(chunk: int) -> int:
    return _signed(((chunk + 1) * _ODD[1] ^ chunk * _ODD[0]) & _MASK | 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
