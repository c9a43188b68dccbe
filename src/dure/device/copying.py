"""Copies of much memory that nobody reads soon: past the caches, in one call for many tensors.

`copying.c` is compiled when dure is installed; where there was no compiler, torch copies, in up to twice the time.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Sequence

import torch

from dure.base.compiled import compiled_function
from dure.device.accelerator import is_host
from dure.device.pinned import DeviceReader
from dure.device.streams import ready_now

_threads = threading.local()
POPULATE_WRITE = getattr(mmap, "MADV_POPULATE_WRITE", 23)
"""For madvise, since Linux 5.14: provide pages before they are written."""


def copy_into(memory: torch.Tensor, places: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
    """Copy these flat tensors into a memory (uint8), each to its place in bytes, aligned for its type.

    Those on a device come through pinned memory, on a stream of their own that first waits for this thread's.
    """
    kernel = _compiled()
    lengths = [tensor.nbytes for tensor in tensors]
    if (
        max((place + length for place, length in zip(places, lengths, strict=True)), default=0)
        > memory.numel()
    ):
        raise ValueError(f"{sum(lengths)} bytes do not fit into {memory.numel()}")
    there = [at for at, tensor in enumerate(tensors) if not is_host(tensor.device) and tensor.numel()]
    if there:
        device = tensors[there[0]].device
        reader().copy(memory, [places[at] for at in there], [tensors[at] for at in there], ready_now(device))
        rest = sorted(set(range(len(tensors))) - set(there))
        places, tensors = [places[at] for at in rest], [tensors[at] for at in rest]
        lengths = [tensor.nbytes for tensor in tensors]
    if kernel is None or not all(_is_plain(tensor) for tensor in (memory, *tensors)):
        for place, length, tensor in zip(places, lengths, tensors, strict=True):
            memory[place : place + length].view(tensor.dtype).copy_(tensor)
        return
    count, start = len(tensors), memory.data_ptr()
    pointers, numbers = ctypes.c_void_p * count, ctypes.c_size_t * count
    kernel(
        pointers(*(start + place for place in places)),
        pointers(*(tensor.data_ptr() for tensor in tensors)),
        numbers(*lengths),
        count,
    )


def reader() -> DeviceReader:
    """This thread's."""
    if not hasattr(_threads, "reader"):
        _threads.reader = DeviceReader()
    found: DeviceReader = _threads.reader
    return found


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous()


def _compiled() -> Callable[..., None] | None:
    return compiled_function("dure.device._copying", "dure_copy_1", *(ctypes.c_void_p,) * 3, ctypes.c_size_t)
