"""How far a run is, from what its ranks have recorded; for a job that a scheduler has."""

from __future__ import annotations

import json
from dataclasses import dataclass

from dure.base.files import read_at_most
from dure.base.run_folder import RunFolder
from dure.observe.events import Stepped, TeamFormed, recent_events, totals_in

_SUMMARY_BYTES = 64 << 20


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
        steps = totals_in(path).steps
    except OSError:
        return None
    if steps == 0:
        return None
    step, loss = 0, None
    for event in recent_events(path):
        if isinstance(event, TeamFormed):
            step = event.start  # what the session before did from here on is done again
        elif isinstance(event, Stepped):
            step, loss = event.step + 1, event.loss
    summary = _summary(folder) if step == steps else {}
    return Progress(step, steps, loss, bool(summary), summary.get("weights_sha256"))


def _summary(folder: RunFolder) -> dict[str, str]:
    try:
        raw = json.loads(read_at_most(folder.summary, _SUMMARY_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return raw if isinstance(raw, dict) else {}
