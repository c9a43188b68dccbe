"""How often to save, and what failures cost: Young's interval with Daly's correction."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Failures:
    """What is expected of a run whose nodes fail now and then."""

    team_mtbf_hours: float
    """Between two failures of any node."""
    interval_seconds: float
    """Between two checkpoints: where the time for saving and the work that is lost together are least."""
    interval_steps: int
    lost_seconds: float
    """Expected work that one failure costs, with starting again."""
    expected_failures: float
    """In the whole run."""
    overhead: float
    """What saving and failures add to the time, as a part of it."""
    hours: float
    """Of the whole run, with all that."""


def daly_interval(save_seconds: float, mtbf_seconds: float) -> float:
    """Seconds between the end of a checkpoint and the beginning of the next (Daly 2006, equation 37)."""
    if save_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = save_seconds / (2 * mtbf_seconds)
    young = math.sqrt(2 * save_seconds * mtbf_seconds)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


def failures(
    *,
    steps: int,
    step_seconds: float,
    save_seconds: float,
    restart_seconds: float,
    node_mtbf_hours: float,
    nodes: int,
) -> Failures:
    """`save_seconds` is what one checkpoint takes of the step path; saving itself may go on beside it."""
    mtbf = node_mtbf_hours * 3600 / nodes
    # Never more often than every step, and never so long that none would be saved.
    interval = max(step_seconds, daly_interval(save_seconds, mtbf))
    work = steps * step_seconds
    lost = interval / 2 + restart_seconds
    overhead = save_seconds / interval + lost / mtbf
    seconds = work * (1 + overhead)
    return Failures(
        team_mtbf_hours=mtbf / 3600,
        interval_seconds=interval,
        interval_steps=max(1, round(interval / step_seconds)),
        lost_seconds=lost,
        expected_failures=seconds / mtbf,
        overhead=overhead,
        hours=seconds / 3600,
    )
