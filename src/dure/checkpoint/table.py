"""Where each tensor of a state lies, when all of them lie in one memory: the same on every rank, for any team."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from dure.base.errors import CheckpointError
from dure.base.say import printable

LINE_BYTES = 64
"""Tensors start, and are cut, at multiples of this: no element of any type is cut in two."""


@dataclass(frozen=True)
class TensorSpan:
    """One tensor, and the bytes of the whole state's memory that are its own."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes, without the gap to the next."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Table:
    """All tensors of a state."""

    spans: tuple[TensorSpan, ...]

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> Table:
        """Lay them out one after the other."""
        return _laid_out(tuple(tensors))

    @cached_property
    def nbytes(self) -> int:
        """Of the memory that holds them all."""
        last = self.spans[-1] if self.spans else None
        return 0 if last is None else last.start + -(-last.nbytes // LINE_BYTES) * LINE_BYTES

    @cached_property
    def by_name(self) -> dict[str, TensorSpan]:
        """Each by its name."""
        return {span.name: span for span in self.spans}

    @cached_property
    def json(self) -> str:
        """What `to_plain` gives, as text."""
        return json.dumps(self.to_plain())

    def to_plain(self) -> list[list[Any]]:
        """For JSON."""
        return [[p.name, str(p.dtype).removeprefix("torch."), list(p.shape)] for p in self.spans]

    @classmethod
    def from_plain(cls, told: Any) -> Table:
        """What `to_plain` gave; CheckpointError when it cannot be that."""
        try:
            return cls.of((name, dtype_named(dtype), tuple(map(int, shape))) for name, dtype, shape in told)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"its list of tensors cannot be read ({error})") from None


@lru_cache(maxsize=4)
def _laid_out(tensors: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]) -> Table:
    """A run has the same table at every step, and its steps wait for it."""
    spans, start = [], 0
    for name, dtype, shape in tensors:
        span = TensorSpan(name, dtype, shape, start)
        spans.append(span)
        start += -(-span.nbytes // LINE_BYTES) * LINE_BYTES
    return Table(tuple(spans))


def dtype_named(name: str) -> torch.dtype:
    """The type that torch calls so."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(
            f"it has a tensor of type {printable(name, 40)}, which this torch does not know"
        )
    return found


def cut(spans: Iterable[TensorSpan], part: int, parts: int) -> Iterator[tuple[TensorSpan, int, int]]:
    """The `part`-th of `parts` about equal shares of these tensors: tensor, first element, end."""
    known = [(span, -(-span.nbytes // LINE_BYTES)) for span in spans]
    lines = sum(length for _, length in known)
    first, end = part * lines // parts, (part + 1) * lines // parts
    at = 0
    for span, length in known:
        low, high = max(first, at) - at, min(end, at + length) - at
        if low < high:
            line = LINE_BYTES // span.dtype.itemsize
            yield span, low * line, min(high * line, span.numel)
        at += length
