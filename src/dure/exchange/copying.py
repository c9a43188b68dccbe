"""Copies of much memory that nobody reads soon: past the caches, in one call for many tensors.

`copying.c` is compiled when dure is installed; where there was no compiler, torch copies, in up to twice the time.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch


def copy_all(into: Sequence[torch.Tensor], out_of: Sequence[torch.Tensor]) -> None:
    """Copy each tensor of `out_of` to its counterpart, of the same type and number of elements; all of them flat."""
    kernel = _compiled()
    if kernel is None or not all(_is_plain(tensor) for tensor in (*into, *out_of)):
        for target, source in zip(into, out_of, strict=True):
            target.copy_(source)
        return
    count = len(into)
    pointers = ctypes.c_void_p * count
    lengths = [target.numel() * target.element_size() for target in into]
    kernel(
        pointers(*(target.data_ptr() for target in into)),
        pointers(*(source.data_ptr() for source in out_of)),
        (ctypes.c_size_t * count)(*lengths),
        count,
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()


@functools.cache
def _compiled() -> Any:
    """The copy that was compiled at installation; None where there is none."""
    found = importlib.util.find_spec("dure.exchange._copying")
    if found is None or found.origin is None:
        return None
    try:
        kernel = ctypes.CDLL(found.origin).dure_copy_1
    except (OSError, AttributeError):  # for another machine, or of another version
        return None
    kernel.argtypes = (*(ctypes.c_void_p,) * 3, ctypes.c_size_t)
    kernel.restype = None
    return kernel
