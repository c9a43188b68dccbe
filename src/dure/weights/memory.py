"""Private memory for the parameters: one mapping, its pages fetched a run at a time just before they are written."""

from __future__ import annotations

import ctypes
import mmap

import torch

from dure.device.copying import POPULATE_WRITE

_LINE = 64
"""Tensors start at multiples of this: a cache line, and what torch's own allocator gives."""


def memory_for(tensor: torch.Tensor) -> int:
    """The bytes that a tensor takes here."""
    return -(-tensor.nbytes // _LINE) * _LINE


class FreshMemory:
    """Anonymous and private: a write is nobody else's. Lives as long as a tensor in it.

    First touch is most of the cost of loading from a warm cache: the kernel finds a page, clears it and returns, page
    by page. Asked for a run of pages at once, it returns once, and what it cleared is still in the core's cache when
    it is overwritten: a quarter less time. (Huge pages are faster still on a machine that has them at hand, and many
    times slower on one that has to make them; see docs/log.md.)
    """

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._used = 0
        self._can_fetch = True

    def tensor_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """The next tensor of this shape, type and strides; memory elsewhere, if its elements do not lie in order."""
        if not tensor.is_contiguous() or not tensor.numel():
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        start = self._used
        self._used += memory_for(tensor)
        flat = torch.frombuffer(self._map, dtype=tensor.dtype, count=tensor.numel(), offset=start)
        return flat.view(tensor.shape)

    def fetch(self, address: int, nbytes: int) -> None:
        """Have the pages of this run in memory, if the run is in this memory and the kernel can (Linux 5.14)."""
        start = address - self._base
        if not self._can_fetch or not 0 <= start < len(self._map):
            return
        first = start & -mmap.PAGESIZE
        try:
            self._map.madvise(POPULATE_WRITE, first, start + nbytes - first)
        except OSError:
            self._can_fetch = False  # then each page is fetched when it is written
