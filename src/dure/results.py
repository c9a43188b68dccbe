"""What a rank tells the launcher when it is done: plain values, readable without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Apart:
    """How far replicas that were not synchronised have drifted."""

    largest: float
    """The largest difference of any one weight between any two ranks."""
    rms: float
    """Root mean square, over all weights, of that difference."""


@dataclass(frozen=True)
class RankResult:
    """The end of one rank's run."""

    rank: int
    steps: int
    epochs: int
    loss: float
    metrics: dict[str, float]
    samples_seen: int
    recipe: str
    weights_sha256: str
    fingerprint: str
    parameters: int
    samples: int
    device: str
    seconds: dict[str, float]
    """By phase; `train` is the loop without evaluation."""
    lost_events: int
    apart: Apart | None
    notes: tuple[str, ...]
    start: int = 0
    """The first step of this session; more than 0 when the run was resumed."""
