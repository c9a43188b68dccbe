"""Who holds the others up: the rank that comes last waits least. Only differences of each rank's own clock are used."""

from __future__ import annotations

from typing import Any

import numpy as np

_LEAST_MS = 2.0
_LEAST_SHARE_OF_STEP = 0.05
_LEAST_OFTEN = 0.6


def straggler(wait: np.ndarray[Any, Any], span: np.ndarray[Any, Any]) -> dict[str, Any] | None:
    """From [rank, step] waits and lengths of steps in microseconds: the rank that the others wait for, by how many
    milliseconds per step, and in which share of the steps; None when there is none worth a name."""
    steps = np.isfinite(wait).all(axis=0)
    if not steps.any():
        return None
    told = wait[:, steps]
    last = told.argmin(axis=0)
    counts = np.bincount(last, minlength=told.shape[0])
    rank = int(counts.argmax())
    often = float(counts[rank]) / told.shape[1]
    others = np.delete(told, rank, axis=0)
    behind = float(np.median(others.min(axis=0) - told[rank])) / 1e3
    length = span[np.isfinite(span)]
    step_ms = float(np.median(length)) / 1e3 if length.size else 0.0
    if often < _LEAST_OFTEN or behind < max(_LEAST_MS, _LEAST_SHARE_OF_STEP * step_ms):
        return None
    return {
        "rank": rank,
        "behind_ms": round(behind, 3),
        "often": round(often, 3),
        "step_ms": round(step_ms, 3),
    }
