"""Whether a dataset can be split exactly: its samples depend on (seed, epoch, sample) alone, on every rank.

Some samples are read at the start, twice and in different orders on different ranks, and compared. That finds a dataset
that caches what it augmented, draws from a generator of its own, reads the rank, or was split before.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

from dure.base.errors import ModelRefused
from dure.comm.group import Group
from dure.data.dataset import SeededSamples, length_of
from dure.data.seeds import generators_kept
from dure.device.fingerprint import fingerprint

SAMPLES = 8
"""That are looked at."""
LOOK_SECONDS = 1.0
"""After which no further sample is looked at: they may be large."""
_EPOCHS = (0, 1)


@dataclass(frozen=True)
class Look:
    """What a rank saw of a dataset."""

    length: int
    bits: dict[str, str]
    """Fingerprints of samples, by "epoch/sample"."""


def look_at(
    dataset: Dataset[Any], key: str, seed: int, place: str, *, backwards: bool, again: bool = True
) -> Look:
    """Read some samples, `again` in the opposite order; raises where the same sample has other bits then.

    `backwards`: later epochs first, so that what is kept of one epoch shows in the other.
    """
    length = length_of(dataset, key)
    chosen = sorted({at * (length - 1) // max(SAMPLES - 1, 1) for at in range(SAMPLES)})
    epochs = _EPOCHS[::-1] if backwards else _EPOCHS
    samples = SeededSamples(dataset, seed, place)
    began, bits = time.monotonic(), {}
    for sample in chosen:
        for epoch in epochs:
            bits[f"{epoch}/{sample}"] = sample_bits(samples[epoch, sample])
        if time.monotonic() - began > LOOK_SECONDS:
            break
    for name in reversed(list(bits)) if again else ():
        epoch, sample = map(int, name.split("/"))
        if sample_bits(samples[epoch, sample]) != bits[name]:
            raise ModelRefused(
                f"{key}: sample {sample}, read twice, gives other bits; draw augmentation from the global generators "
                "of torch, numpy or random, which are seeded by (seed, epoch, sample), and keep no state"
            )
    return Look(length, bits)


def check_dataset(
    dataset: Dataset[Any],
    key: str,
    seed: int,
    group: Group,
    *,
    place: str = "sample",
    fresh: Callable[[], Dataset[Any]] | None = None,
) -> int:
    """The dataset's length, the same on all ranks, as are its samples; a collective call.

    `fresh` makes another such dataset, which has read nothing yet: it must give the same samples in any order.
    """
    with (
        generators_kept()
    ):  # each rank reads in another order: a model made next would start with other weights
        own = look_at(dataset, key, seed, place, backwards=bool(group.rank % 2))
        if fresh is not None:
            other = look_at(fresh(), key, seed, place, backwards=not group.rank % 2, again=False)
            _refuse_state(own, other, key)
    told = group.gather(json.dumps([own.length, own.bits]), "comparing datasets")
    everyones = [Look(*json.loads(text)) for text in told]
    for rank, other in enumerate(everyones):
        if other.length != everyones[0].length:
            raise ModelRefused(
                f"{key}: {everyones[0].length} samples on rank 0 and {other.length} on rank {rank}; give every rank "
                "the whole dataset: it is split between them here"
            )
        differing = _first_difference(everyones[0], other)
        if differing is not None:
            raise ModelRefused(
                f"{key}: sample {differing} has other bits on rank {rank} than on rank 0; give every rank the same "
                "whole dataset (it is split here), whose samples depend on their number alone: no rank, no clock, no "
                "state that earlier reads leave (a cache of augmented samples, a generator of its own)"
            )
    return own.length


def _refuse_state(own: Look, other: Look, key: str) -> None:
    differing = _first_difference(own, other)
    if own.length != other.length or differing is not None:
        raise ModelRefused(
            f"{key}: sample {differing or 0} of a second dataset from the same factory, read in another order, has "
            "other bits; a sample may depend on its number and on the global generators of torch, numpy and random, "
            "not on what was read before (a cache of augmented samples, a generator of its own) or on the clock"
        )


def _first_difference(one: Look, other: Look) -> int | None:
    both = [name for name in one.bits if name in other.bits]
    return next((int(name.split("/")[1]) for name in both if one.bits[name] != other.bits[name]), None)


def sample_bits(sample: object) -> str:
    """A fingerprint of all tensors and numbers in a sample."""

    def tensors(value: object, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                yield from tensors(value[key], f"{name}.{key}")
        elif isinstance(value, list | tuple):
            for at, inner in enumerate(value):
                yield from tensors(inner, f"{name}.{at}")
        elif isinstance(value, str | bytes):
            raw = value.encode() if isinstance(value, str) else value
            yield name, torch.frombuffer(bytearray(raw or b"\0"), dtype=torch.uint8)
        else:
            with contextlib.suppress(TypeError, ValueError, RuntimeError):
                yield name, torch.as_tensor(value)

    return fingerprint(tensors(sample, ""))
