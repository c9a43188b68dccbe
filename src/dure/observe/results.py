"""What a rank tells the launcher when it is done: plain values, readable without torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Apart:
    """How far replicas that were not synchronised have drifted."""

    largest: float
    """The largest difference of any one weight between any two ranks."""
    rms: float
    """Root mean square, over all weights, of that difference."""


@dataclass(frozen=True)
class Loaded:
    """Pretrained weights that a rank began with, and what it asked of the storage for them."""

    weights: str
    how: str
    fingerprint: str
    bytes: int
    requests: int
    """Of this rank."""
    read_bytes: int
    """Of this rank."""


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
    ledger: dict[str, Any]
    """The samples that were used (`SampleLedger.to_plain`): by all ranks, or by this one when they train apart."""
    loaded: Loaded | None = None
    """The pretrained weights, if there are any."""
    start: int = 0
    """The first step of this session; more than 0 when the run was resumed."""
    audited: int = 0
    """Shards of other ranks that this one computed again, in this session."""
    storage: tuple[int, int] = (0, 0)
    """Requests and bytes that this rank asked of the storage, in all sessions."""

    def as_json(self) -> dict[str, Any]:
        """As plain values, for the way from another node."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RankResult:
        """The inverse of `as_json`."""
        return cls(
            **{
                **values,
                "notes": tuple(values["notes"]),
                "storage": tuple(values["storage"]),
                "apart": Apart(**values["apart"]) if values["apart"] is not None else None,
                "loaded": Loaded(**values["loaded"]) if values["loaded"] is not None else None,
            }
        )
