"""The C library's allocator, set for training: what a step frees, the next one takes again."""

from __future__ import annotations

import ctypes
import os

KEPT_BYTES = 256 << 20
"""Of freed memory at the heap's end that a rank keeps."""
_LARGEST_BLOCK = 32 << 20
"""The most that glibc lets come from the heap; larger blocks are mapped by themselves."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> bool:
    """Have malloc keep what is freed, up to `KEPT_BYTES`; returns whether that was possible.

    By default glibc gives a few megabytes back as soon as they are free, and the kernel zeroes them page by page when
    the next shard touches them: a third of the CPU time of an MLP whose gradients are 2 MB. Variables of glibc's own
    (MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_) come first.
    """
    if any(name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # not glibc
        return False
    return bool(
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK) and mallopt(_M_TRIM_THRESHOLD, ctypes.c_int(KEPT_BYTES))
    )
