"""Shared memory without a name: no crash can leave any behind.

A segment is a memfd, or the unlinked file behind `share_memory_`. Other processes of the same user map it
through `/proc/<pid>/fd/<fd>`; the kernel frees it when the last of them is gone.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Offer:
    """Where another process finds a segment."""

    pid: int
    descriptor: int
    nbytes: int

    def as_list(self) -> list[int]:
        """For JSON."""
        return [self.pid, self.descriptor, self.nbytes]


class Segment:
    """A piece of memory that this process made and others may map."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = max(nbytes, mmap.PAGESIZE)
        self._descriptor = os.memfd_create("dure", os.MFD_CLOEXEC)
        os.fchmod(self._descriptor, 0o600)
        os.ftruncate(self._descriptor, self.nbytes)
        self.bytes = mmap.mmap(self._descriptor, self.nbytes)

    def offer(self) -> Offer:
        """What peers need to map it."""
        return Offer(os.getpid(), self._descriptor, self.nbytes)

    def tensor(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """The segment's first elements."""
        return torch.frombuffer(self.bytes, dtype=dtype, count=numel)

    def close(self) -> None:
        """Let go of the descriptor; mappings live as long as tensors look at them."""
        os.close(self._descriptor)


def offer_tensor(tensor: torch.Tensor) -> Offer:
    """Move a tensor's storage into shared memory, in place: all views of it move along."""
    tensor.share_memory_()
    descriptor, nbytes = tensor.untyped_storage()._share_fd_cpu_()
    return Offer(os.getpid(), descriptor, nbytes)


def map_offer(offer: Offer) -> mmap.mmap:
    """Map another process's segment."""
    descriptor = os.open(f"/proc/{offer.pid}/fd/{offer.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, offer.nbytes)
    finally:
        os.close(descriptor)
