"""Settings of optimizers and schedules as plain JSON, and back: without pickle, and without losing a bit."""

from __future__ import annotations

from collections import Counter
from typing import Any

from dure.base.errors import CheckpointError

_TUPLE, _PAIRS, _COUNTER = "(tuple)", "(pairs)", "(counter)"


def to_plain(value: Any, what: str) -> Any:
    """`value` as JSON can say it. Tuples, and tables whose keys are no texts, are marked as what they are.

    Floats are safe: JSON has their shortest digits that read back as the same bits.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [to_plain(inner, what) for inner in value]
    if type(value) is tuple:
        return {_TUPLE: [to_plain(inner, what) for inner in value]}
    if type(value) is dict and all(type(key) is str and not key.startswith("(") for key in value):
        return {key: to_plain(inner, f"{what}.{key}") for key, inner in value.items()}
    if type(value) in (dict, Counter):
        mark = _COUNTER if type(value) is Counter else _PAIRS
        return {mark: [[to_plain(key, what), to_plain(inner, what)] for key, inner in value.items()]}
    raise CheckpointError(
        f"{what} is a {type(value).__name__}, which a checkpoint cannot hold: it has tensors, numbers, texts, lists "
        "and tables"
    )


def from_plain(value: Any) -> Any:
    """The inverse of `to_plain`."""
    if isinstance(value, list):
        return [from_plain(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {_TUPLE}:
        return tuple(from_plain(inner) for inner in value[_TUPLE])
    for mark, kind in ((_PAIRS, dict), (_COUNTER, Counter)):
        if set(value) == {mark}:
            return kind({from_plain(key): from_plain(inner) for key, inner in value[mark]})
    return {key: from_plain(inner) for key, inner in value.items()}
