"""That a state is everyone's: each rank also hashes, in its own replica, the share that its neighbour hands over.

A state is put together from all ranks' shares. Without a witness, a replica that went wrong would pass its share on to
everyone at the next restart. Weights and optimizer state do not change between two updates, so the hash is taken
beside the next forward and backward pass; buffers do, so those are copied first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch
import xxhash

from dure.base.errors import CheckpointError
from dure.checkpoint.table import LINE_BYTES
from dure.device.fingerprint import raw_bytes

HASH_SECONDS = 600.0


def disagreeing(shared: Sequence[str], witnessed: Sequence[str]) -> list[int]:
    """The parts whose witness saw other bits; both sequences are by part."""
    parts = len(shared)
    return [part for part in range(parts) if shared[part] != witnessed[(part - 1) % parts]]


def fingerprint_of(runs: Iterable[tuple[int, memoryview | bytes]]) -> str:
    """Of runs of bytes at these places of a state. Short gaps between tensors count as zeros: they are there too."""
    digest, end = xxhash.xxh3_64(), 0
    for start, data in runs:
        if 0 < start - end < LINE_BYTES and end:
            digest.update(bytes(start - end))
        digest.update(data)
        end = start + len(data)
    return digest.hexdigest()


class LiveHash:
    """The fingerprint of pieces of the live replica; to be taken before the next update."""

    def __init__(self, runs: Iterable[tuple[int, torch.Tensor]]) -> None:
        """`runs` are flat tensors, each with its offset in the state."""
        self._runs = sorted(runs, key=lambda run: run[0])
        self._taken = threading.Event()
        self.value = ""

    def take(self) -> str:
        """Compute it, in whatever thread."""
        try:
            self.value = fingerprint_of((start, raw_bytes(values)) for start, values in self._runs)
        finally:
            self._runs = []  # the live tensors are the next step's
            self._taken.set()
        return self.value

    def wait(self) -> None:
        """Return when it is taken: the replica may change."""
        if not self._taken.wait(HASH_SECONDS):
            raise CheckpointError(f"a share of the state was not hashed within {HASH_SECONDS:.0f} s")


def is_not_finite(values: torch.Tensor) -> bool:
    """Whether a tensor of numbers has one that is NaN or infinite."""
    if not values.is_floating_point() or not values.numel():
        return False
    low, high = torch.aminmax(values)  # both are NaN as soon as one element is
    return not bool(torch.isfinite(low) & torch.isfinite(high))
