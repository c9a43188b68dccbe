"""What the step bench trains, and what a rank brings home. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

LIMIT, DURE, DDP = "limit", "dure", "ddp"
SHARDED = "dure_sharded"
"""dure whose ranks share the optimizer's work."""
FINER = "dure_finer"
"""dure with more shards than ranks."""
STATIC = "ddp_static"
"""Plain DDP with gradient_as_bucket_view and static_graph: the fastest that it can be set to."""
TUNED = "ddp_tuned"
"""The same with the bucket size that was fastest here and now: DDP as an expert sets it up."""
BUCKET_CAPS_MB = (1.0, 4.0, 10.0, 25.0, 100.0)
"""That are tried for it; 25 is DDP's own, 100 takes all gradients in one bucket."""
BACKEND, ATTACHED = "dure_backend", "dure_attach"
"""Plain DDP on the backend dure; plain DDP with dure.attach."""
LIBRARIES = {"accelerate": "accelerate", "fabric": "lightning_fabric"}
"""Contenders that need a package that may not be there."""


@dataclass(frozen=True)
class Workload:
    """The same model, data and optimizer for every contender: 9.0 million parameters, a step of about a
    seventh of a second on two cores, so that synchronisation is a large part of it and shows."""

    width: int = 320
    layers: int = 6
    heads: int = 5
    vocabulary: int = 2560
    seq: int = 32
    global_batch: int = 16
    shards: int = 8
    """Shards of the runs that show the price of exactness."""
    batches: int = 4
    """Global batches that are made before the clock runs, and used in turn."""
    lr: float = 1e-4
    seed: int = 1
    bucket_cap_mb: float = 25.0
    """Of `ddp_tuned`; its ranks find it out."""


@dataclass(frozen=True)
class RankFigures:
    """What one rank measured. A list has one entry a round."""

    parameters: int
    seconds: dict[str, list[float]]
    """Of one step, by contender."""
    cpu_seconds: dict[str, list[float]]
    """Of one step, over all threads of this rank."""
    differences: dict[str, float]
    """How far a contender's weights are from dure's after their first step, at most."""
    bucket_caps_ms: dict[float, float]
    """What a step of DDP took with each size of buckets, on the slowest rank; empty where nobody asked."""
