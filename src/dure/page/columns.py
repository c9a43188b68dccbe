"""Lines of steps as columns of numbers, without an object per step: a long run has millions of them.

A line is believed as `observe.events.decode` believes it: every column there, of the right length and type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pydantic_core

from dure.observe.events import VERSION, Recorded, Stepped, decode
from dure.observe.events.lines import LONGEST_LINE, MOST_STEPS

PHASES = ("save", "data", "compute", "exchange", "update")
"""Of a step, in the order of time."""
COLUMNS = ("loss", "lr", "norm", "samples", "own", "span", *PHASES, "wait")
"""What is kept of a step. `span`: since the rank's step before; times are microseconds. `wait` is part of `exchange`;
`samples` are of all ranks, `own` of this one. What is not known is NaN."""
AT = {name: place for place, name in enumerate(COLUMNS)}
Table = np.ndarray[Any, np.dtype[np.float32]]
_TIMES = (*PHASES, "wait")
_NAMES = frozenset(_TIMES)


@dataclass(frozen=True)
class Steps:
    """Steps that follow each other."""

    number: int | None
    """Of the first, among the rank's events."""
    first: int
    epoch: int
    began_at: float
    """The rank's own clock when the first was recorded, in seconds."""
    ended_at: float
    table: Table
    """A row per name in COLUMNS; `span` of the first step is NaN: it is not known here."""
    ids: tuple[tuple[int, ...], ...] | None = None

    def __len__(self) -> int:
        return int(self.table.shape[1])


def read_line(line: bytes) -> Steps | list[Recorded]:
    """What a line tells: steps, or other events; ValueError (`Unreadable`) when it is none of ours."""
    if line.startswith(b'{"v":2,"kind":"steps"') and line.endswith(b"\n") and len(line) <= LONGEST_LINE:
        try:
            return _steps(pydantic_core.from_json(line))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ValueError(f"not a line of steps: {type(error).__name__}") from None
    records = decode(line)
    if records and isinstance(records[0].event, Stepped):
        return _of_records(records)
    return records


def _steps(raw: dict[str, Any]) -> Steps:
    length = raw["n"]
    if type(length) is not int or not 1 <= length <= MOST_STEPS or raw["v"] != VERSION:
        raise ValueError("a number of steps that we do not write")
    number, first, epoch = raw.get("i"), _whole(raw["step"]), _whole(raw["epoch"])
    at = raw["at"]
    if type(at) not in (int, float) or (number is not None and _whole(number) != number):
        raise ValueError("no time, or no number")
    table = np.full((len(COLUMNS), length), np.nan, np.float32)
    for name, key in (
        ("loss", "loss"),
        ("lr", "lr"),
        ("norm", "norm"),
        ("samples", "of"),
        ("own", "samples"),
    ):
        table[AT[name]] = _numbers(raw[key], length)
    after = _numbers(raw["after"], length)
    if not (after >= 0).all():
        raise ValueError("time that goes backwards")
    table[AT["span"], 1:] = after[1:]
    for name, told in raw["seconds"].items():
        if name in _NAMES:
            table[AT[name]] = _numbers(told, length)
    ids = raw.get("ids")
    if ids is not None:
        if len(ids) != length:
            raise ValueError("samples of other steps")
        ids = tuple(tuple(map(_whole, of_step)) for of_step in ids)
    return Steps(number, first, epoch, float(at), float(at) + float(after.sum()) / 1e6, table, ids)


def _of_records(records: Sequence[Recorded]) -> Steps:
    """A line of version 1: one step."""
    (record,) = records
    step = record.event
    assert isinstance(step, Stepped)
    values = {"loss": step.loss, "lr": step.lr, "samples": step.samples_of_batch, "own": step.samples}
    values |= {name: step.seconds[name] * 1e6 for name in _TIMES if name in step.seconds}
    values["norm"] = np.nan if step.grad_norm is None else step.grad_norm
    table = np.array([[values.get(name, np.nan)] for name in COLUMNS], np.float32)
    ids = None if step.ids is None else (step.ids,)
    return Steps(record.number, step.step, step.epoch, record.at, record.at, table, ids)


def _numbers(told: Any, length: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """One value for all, or all of them; a number that is not finite is told by its name, None is no number."""
    if isinstance(told, list) and len(told) != length:
        raise ValueError("columns of other lengths")
    with np.errstate(over="ignore"):
        found = np.array(told, np.float64)  # None becomes NaN, "nan" and "inf" what they say
    if found.shape not in ((), (length,)):
        raise ValueError("columns in columns")
    return np.broadcast_to(found, (length,))


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError("not a whole number")
    return value
