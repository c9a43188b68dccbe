"""Copies between a device and memory of the host: through pinned memory, many under way at once, one wait for all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dure.device.accelerator import is_host, wait_for
from dure.device.streams import Ready, SideStream

CHUNK_BYTES = 32 << 20
"""Of a pinned buffer; there are two, so that one is emptied while the other is filled."""


class DeviceReader:
    """Brings tensors of a device into memory of the host, on a stream of its own. Used by one thread at a time."""

    def __init__(self) -> None:
        self._side = SideStream()
        self._buffers: list[torch.Tensor] = []

    def copy(
        self, memory: torch.Tensor, places: Sequence[int], tensors: Sequence[torch.Tensor], ready: Ready
    ) -> None:
        """Copy these tensors of one device into a flat memory (uint8), each to its place in bytes.

        `ready` is when their values are there. It returns when the bytes are in the memory."""
        device = tensors[0].device
        if not self._buffers:
            self._buffers = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        with self._side.after(ready, device=device):
            filling: list[tuple[int, int, int]] = []
            turn, used = 0, 0
            emptying: tuple[torch.Tensor, list[tuple[int, int, int]], torch.Event] | None = None
            for place, tensor in zip(places, tensors, strict=True):
                flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
                # What is read later on this stream must not be given to another tensor meanwhile.
                flat.record_stream(torch.accelerator.current_stream(device))
                at = 0
                while at < flat.numel():
                    if used == CHUNK_BYTES:
                        moment = torch.accelerator.current_stream(device).record_event()
                        self._empty(memory, emptying)
                        emptying = (self._buffers[turn], filling, moment)
                        turn, used, filling = 1 - turn, 0, []
                    count = min(flat.numel() - at, CHUNK_BYTES - used)
                    self._buffers[turn][used : used + count].copy_(flat[at : at + count], non_blocking=True)
                    filling.append((place + at, used, count))
                    at, used = at + count, used + count
            self._empty(memory, emptying)
            last = torch.accelerator.current_stream(device).record_event()
            self._empty(memory, (self._buffers[turn], filling, last))

    @staticmethod
    def _empty(
        memory: torch.Tensor, full: tuple[torch.Tensor, list[tuple[int, int, int]], torch.Event] | None
    ) -> None:
        if full is None:
            return
        buffer, runs, moment = full
        moment.synchronize()
        for place, start, count in runs:
            memory[place : place + count].copy_(buffer[start : start + count])


def to_device(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on the device, by way of pinned memory; it is there for this thread's current stream. Torch
    keeps the pinned memory until it is read."""
    if is_host(device) or not is_host(value.device):
        return value.to(device)
    pinned = value if value.is_pinned() else value.pin_memory()
    return pinned.to(device, non_blocking=True)


def move_module(module: torch.nn.Module, device: torch.device) -> None:
    """`module.to(device)`, with all copies under way at once."""
    if is_host(device):
        module.to(device)
        return
    for tensor in (*module.parameters(), *module.buffers()):
        if is_host(tensor.device) and tensor.layout == torch.strided and tensor.numel():
            tensor.data = tensor.data.pin_memory()
    module.to(device, non_blocking=True)
    wait_for(device)
