"""Which tensor of a source belongs to which of the model's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dure.errors import WeightsError
from dure.loading.header import TensorAt
from dure.loading.source import Source

Wanted = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""The model's parameters and buffers by name: shape and dtype."""

PREFIXES = ("module.", "_orig_mod.")
"""What DistributedDataParallel and torch.compile put before every name."""


@dataclass(frozen=True)
class Match:
    """Who gets what."""

    pairs: tuple[tuple[TensorAt, str], ...]
    """A tensor of the source, and the name of the model's; in the order of the source's bytes."""
    missing: tuple[str, ...]
    """The model's names that the source has nothing for: they keep what they were built with."""
    unexpected: tuple[str, ...]
    """The source's names that the model has no place for."""


def match(source: Source, wanted: Wanted, *, strict: bool, prefixes: Sequence[str] = PREFIXES) -> Match:
    """Pair the source's tensors with the model's by name."""
    found = {tensor.name: tensor for tensor in source.tensors}
    pairs = tuple((t, t.name) for t in source.tensors if t.name in wanted)
    missing = tuple(name for name in wanted if name not in found)
    unexpected = tuple(name for name in found if name not in wanted)
    wrong = [t.name for t, name in pairs if t.shape != wanted[name][0]]
    if wrong or (strict and (missing or unexpected)):
        raise WeightsError(f"missing: {missing}; unexpected: {unexpected}; of another shape: {wrong}")
    return Match(pairs, missing, unexpected)
