"""Events as lines of JSON, and back.

An event is one object with its number and its time. Steps that follow each other share a line, in columns: what is the
same in all of them stands there once, times are whole microseconds. A step of a long run takes some tens of bytes.

    {"v":2,"kind":"note","i":17,"at":5.25,"text":"…"}
    {"v":2,"kind":"steps","i":18,"at":5.5,"n":3,"step":40,"epoch":0,"samples":8,"of":32,"lr":0.001,"norm":null,
     "loss":[0.31,0.3,0.29],"after":[0,50112,49871],"seconds":{"data":[12,9,11],"compute":[30021,30110,29870],…},
     "ids":[[3,7],[1,9],[0,2]]}

Whoever reads lines trusts none of them: a line that is cut short, damaged, made up or of a newer version is left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import pydantic_core
from pydantic import TypeAdapter, ValidationError

from dure.observe.events.kinds import Event, Stepped

VERSION = 2
"""Of the schema. Version 1 had a line for each step; it is still read."""
LONGEST_LINE = 1 << 20
MOST_STEPS = 4096
"""In one line."""
_STEPS = "steps"
_LARGEST = 1 << 63
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Recorded(NamedTuple):
    """An event with its number among those of its rank, and the rank's own monotonic clock, in seconds."""

    number: int | None
    """None: in a line of version 1."""
    at: float
    event: Event


class Unreadable(ValueError):
    """A line that tells no event of this version."""


class Newer(Unreadable):
    """A line of a newer version."""


def encode(event: Event, at: float, number: int | None = None) -> str:
    """One event as a line."""
    return encode_all([Recorded(number, at, event)])


def encode_all(records: Iterable[Recorded]) -> str:
    """Events, in order, as lines."""
    return "".join(
        _line(group[0]) if not isinstance(group[0].event, Stepped) else _steps_line(group)
        for group in _groups(records)
    )


def decode(line: bytes) -> list[Recorded]:
    """What one line tells; Unreadable when it is none of ours, Newer when a newer version wrote it."""
    if not line.endswith(b"\n") or len(line) > LONGEST_LINE:
        raise Unreadable("half a line, or one that is too long")
    try:
        raw = pydantic_core.from_json(line)
        version, kind, at = raw.pop("v"), raw.pop("kind"), _number(raw.pop("at"))
        if type(version) is not int or version < 1:
            raise Unreadable("a line without a version")
        if version > VERSION:
            raise Newer("these events were written by a newer dure; read them with that version")
        number = raw.pop("i", None)
        if number is not None:
            number = _whole(number)
        if kind == _STEPS:
            return _decoded_steps(raw, number, at)
        if kind == Stepped.kind:  # version 1
            return [Recorded(None, at, _old_step(raw))]
        values = {name: _measures(value) if type(value) is dict else value for name, value in raw.items()}
        # As JSON: from Python objects, strict means an event already.
        return [Recorded(number, at, _checked(_ADAPTERS[kind].validate_json(pydantic_core.to_json(values))))]
    except Unreadable:
        raise
    except (ValidationError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise Unreadable(f"not an event of this version: {type(error).__name__}") from None


def without_samples(record: Recorded) -> Recorded:
    """The same without the samples of a step, which take most of a line."""
    if isinstance(record.event, Stepped):
        return record._replace(event=replace(record.event, ids=None, mark=None))
    return record


def _groups(records: Iterable[Recorded]) -> Iterator[list[Recorded]]:
    """Steps that can share a line; every other event alone."""
    group: list[Recorded] = []
    samples = 0
    for record in records:
        own = len(record.event.ids or ()) if isinstance(record.event, Stepped) else 0
        # A line that is too long would be left out by readers.
        full = len(group) >= MOST_STEPS or samples + own > MOST_STEPS
        if group and (full or not _continues(group[-1], record)):
            yield group
            group, samples = [], 0
        group.append(record)
        samples += own
    if group:
        yield group


def _continues(before: Recorded, record: Recorded) -> bool:
    last, event = before.event, record.event
    return (
        isinstance(last, Stepped)
        and isinstance(event, Stepped)
        and before.number is not None
        and record.number == before.number + 1
        and record.at >= before.at
        and event.step == last.step + 1
        and event.epoch == last.epoch
        and event.seconds.keys() == last.seconds.keys()
        and (event.ids is None) == (last.ids is None)
        and (event.mark is None) == (last.mark is None)
    )


def _line(record: Recorded) -> str:
    values = {key: _plain(value) for key, value in vars(record.event).items()}
    return _dump({**_head(record.event.kind, record), **values})


def _head(kind: str, record: Recorded) -> dict[str, Any]:
    numbered = {} if record.number is None else {"i": record.number}
    return {"v": VERSION, "kind": kind, **numbered, "at": round(record.at, 6)}


def _steps_line(group: Sequence[Recorded]) -> str:
    steps = [record.event for record in group if isinstance(record.event, Stepped)]
    first = steps[0]
    at = [round(record.at * 1e6) for record in group]
    line = {
        **_head(_STEPS, group[0]),
        "n": len(steps),
        "step": first.step,
        "epoch": first.epoch,
        "samples": _column([step.samples for step in steps]),
        "of": _column([step.samples_of_batch for step in steps]),
        "lr": _column([_plain(step.lr) for step in steps]),
        "norm": _column([_plain(step.grad_norm) for step in steps]),
        "loss": _column([_plain(step.loss) for step in steps]),
        "after": [now - before for before, now in zip([at[0], *at[:-1]], at, strict=True)],
        "seconds": {
            name: _column([round(step.seconds[name] * 1e6) for step in steps]) for name in first.seconds
        },
    }
    if first.ids is not None:
        line["ids"] = [step.ids for step in steps]
    if first.mark is not None:
        line["mark"] = _column([step.mark for step in steps])
    return _dump(line)


def _column(values: Sequence[Any]) -> Any:
    """One value that all have, or all of them."""
    return values[0] if all(value == values[0] for value in values) else list(values)


def _plain(value: Any) -> Any:
    """JSON has no word for numbers that are not finite, nor for the bytes of a path that is not UTF-8."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return value


def _dump(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"


_ADAPTERS: dict[str, TypeAdapter[Any]] = {
    kind.kind: TypeAdapter(kind) for kind in Event.__subclasses__() if kind is not Stepped
}


def _checked(event: Event) -> Event:
    """The event, when no number in it is larger than any that we write."""
    for part in fields(event):
        value = getattr(event, part.name)
        if isinstance(value, int) and abs(value) >= _LARGEST:
            raise Unreadable(f"{part.name} is too large")
    return event


def _decoded_steps(raw: dict[str, Any], number: int | None, at: float) -> list[Recorded]:
    length = _whole(raw.pop("n"), MOST_STEPS)
    step, epoch = _whole(raw.pop("step")), _whole(raw.pop("epoch"))
    samples, of_batch = (_spread(raw.pop(name), length, _whole) for name in ("samples", "of"))
    lr, loss = (_spread(raw.pop(name), length, _number) for name in ("lr", "loss"))
    norm = _spread(raw.pop("norm"), length, lambda value: None if value is None else _number(value))
    after = _spread(raw.pop("after"), length, _whole)
    seconds = {str(name): _spread(told, length, _seconds) for name, told in raw.pop("seconds").items()}
    ids = raw.pop("ids", None)
    mark = raw.pop("mark", None)
    marks = [None] * length if mark is None else _spread(mark, length, _text)
    if raw or (ids is not None and len(ids) != length):
        raise Unreadable("columns that do not belong to steps")
    found, micros = [], 0
    for place in range(length):
        micros += after[place]
        event = Stepped(
            epoch=epoch,
            step=step + place,
            loss=loss[place],
            samples=samples[place],
            samples_of_batch=of_batch[place],
            seconds={name: column[place] for name, column in seconds.items()},
            lr=lr[place],
            grad_norm=norm[place],
            ids=None if ids is None else tuple(map(_whole, ids[place])),
            mark=marks[place],
        )
        found.append(Recorded(None if number is None else number + place, at + micros / 1e6, event))
    return found


def _old_step(raw: dict[str, Any]) -> Stepped:
    ids, seconds = raw["ids"], raw["seconds"]
    return Stepped(
        epoch=_whole(raw["epoch"]),
        step=_whole(raw["step"]),
        loss=_number(raw["loss"]),
        samples=_whole(raw["samples"]),
        samples_of_batch=_whole(raw["samples_of_batch"]),
        seconds={str(name): _number(value) for name, value in seconds.items()},
        lr=_number(raw["lr"]),
        grad_norm=None if raw["grad_norm"] is None else _number(raw["grad_norm"]),
        ids=None if ids is None else tuple(map(_whole, ids)),
        mark=_text(raw["mark"]),
    )


def _spread(told: Any, length: int, checked: Any) -> list[Any]:
    if not isinstance(told, list):
        return [checked(told)] * length
    if len(told) != length:
        raise Unreadable("columns of other lengths")
    return [checked(value) for value in told]


def _whole(value: Any, most: int = _LARGEST) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise Unreadable("not a whole number")
    return value


def _number(value: Any) -> float:
    if isinstance(value, str):
        return _NOT_FINITE[value]
    if type(value) not in (int, float):
        raise Unreadable("not a number")
    return float(value)


def _measures(table: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _NOT_FINITE.get(value, value) if type(value) is str else value for name, value in table.items()
    }


def _seconds(value: Any) -> float:
    return _whole(value) / 1e6


def _text(value: Any) -> str:
    if type(value) is not str:
        raise Unreadable("not a text")
    return value
