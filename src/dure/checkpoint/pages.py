"""Memory that is there before it is needed: the first write to a page costs ten times as much as the next one."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable

import torch

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14
_AT_ONCE_BYTES = 256 << 20


def make_present(memories: Iterable[torch.Tensor]) -> None:
    """Have the kernel provide the pages of these flat memories. What stands in them stays.

    An older kernel refuses; then the first write pays, as ever. The call holds no lock of Python's.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for memory in memories:
        end = memory.data_ptr() + memory.numel() * memory.element_size()
        at = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        while at < end:
            if madvise(at, min(_AT_ONCE_BYTES, end - at), _POPULATE_WRITE) != 0:
                return
            at += _AT_ONCE_BYTES
