"""Randomness by name: every random number comes from the run's one seed and the place it is used at."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch


def seed_of(seed: int, *place: int | str) -> int:
    """A 63-bit seed for one place, such as `("shard", step, micro, shard)`; places never share one."""
    text = ",".join(map(str, (seed, *place)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def seed_all(seed: int) -> None:
    """Start torch's, numpy's and Python's global generators anew."""
    # torch.manual_seed seeds every kind of device, and notes the caller's stack for those that are not up: 100 µs.
    torch.default_generator.manual_seed(seed)
    if (devices := _devices_in_use()) is not None:
        devices.manual_seed_all(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def _devices_in_use() -> Any:
    """What torch has for the accelerators that this process uses; None where it uses none."""
    kind = torch.accelerator.current_accelerator()
    module = None if kind is None else torch.get_device_module(kind)
    return module if module is not None and module.is_initialized() else None


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Whatever is drawn within `with`, the global generators then go on from where they were."""
    states = torch.get_rng_state(), numpy.random.get_state(), random.getstate()
    devices = _devices_in_use()
    of_devices = (
        [] if devices is None else [devices.get_rng_state(at) for at in range(devices.device_count())]
    )
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        for at, state in enumerate(of_devices):
            devices.set_rng_state(state, at)
        numpy.random.set_state(states[1])
        random.setstate(states[2])
