"""How far a run is, from what its first rank recorded. Reads the ends of a file that may be long."""

from __future__ import annotations

import json
from dataclasses import dataclass

from dure.events import Event, Stepped, TeamFormed, decode
from dure.run_folder import RunFolder

_HEAD_BYTES, _TAIL_BYTES = 64 << 10, 256 << 10


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    step: int
    """So many are done."""
    steps: int
    loss: float | None
    done: bool
    """Whether it has come to its end."""
    weights_sha256: str | None
    """Of a run that is done."""


def progress_of(folder: RunFolder) -> Progress | None:
    """How far the run is; None when no rank has recorded anything yet."""
    path = folder.events(0)
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            head = file.read(_HEAD_BYTES)
            file.seek(max(0, size - _TAIL_BYTES))
            tail = file.read(_TAIL_BYTES)
    except OSError:
        return None
    formed = next((event for event in _events(head, whole=True) if isinstance(event, TeamFormed)), None)
    if formed is None:
        return None
    recent = _events(tail, whole=size <= _TAIL_BYTES)
    step, loss = 0, None
    for event in recent:
        if isinstance(event, TeamFormed):
            step = event.start  # what the session before did from here on is done again
        elif isinstance(event, Stepped):
            step, loss = event.step + 1, event.loss
    summary = _summary(folder) if step == formed.steps else {}
    return Progress(step, formed.steps, loss, bool(summary), summary.get("weights_sha256"))


def _events(data: bytes, *, whole: bool) -> list[Event]:
    """The events in a piece of a file; where it does not begin the file, its first line is half a line."""
    lines = data.decode(errors="replace").splitlines(keepends=True)[0 if whole else 1 :]
    return [event for line in lines if (event := decode(line)) is not None]


def _summary(folder: RunFolder) -> dict[str, str]:
    try:
        raw = json.loads(folder.summary.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return raw if isinstance(raw, dict) else {}
