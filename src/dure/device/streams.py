"""Work on a device in a thread of its own: ordered after the thread that hands it over, beside what that does next.

    in the thread that hands over:   ready = ready_now(device)
    in the thread that works:        with side.after(ready): …
    for whoever waits:               future = future_on(device); side.complete(future, value)

On the CPU all of it is nothing: what was computed is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from dure.device.accelerator import is_host, make_current

Ready = torch.Event | None
"""A moment in the stream of whoever recorded it; None on the CPU."""


def ready_now(device: torch.device) -> Ready:
    """All that this thread's current stream was given up to now."""
    if is_host(device):
        return None
    return torch.accelerator.current_stream(device).record_event()


def future_on(device: torch.device) -> torch.futures.Future[Any]:
    """A future whose value is on the device: who waits for it makes its stream wait, not only its thread."""
    if is_host(device):
        return torch.futures.Future()
    return torch.futures.Future(devices=[device])


class SideStream:
    """A stream of one thread's own. Made, and used, in that thread; so is the device made current there."""

    def __init__(self) -> None:
        self._stream: torch.Stream | None = None

    @contextlib.contextmanager
    def after(self, *ready: Ready, device: torch.device) -> Iterator[None]:
        """Within `with`, this thread's work goes into the stream, after those moments."""
        if is_host(device):
            yield
            return
        make_current(device)
        if self._stream is None:
            self._stream = torch.Stream(device=device)
        for moment in ready:
            if moment is not None:
                self._stream.wait_event(moment)
        with self._stream:
            yield

    def wait(self) -> None:
        """Let the host wait for what is in the stream."""
        if self._stream is not None:
            self._stream.synchronize()
