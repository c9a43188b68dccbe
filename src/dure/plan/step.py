"""Seconds of one step of a team, by phase."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from dure.plan.links import Collective, Links, Shape, all_reduce_seconds

BACKWARD_SHARE = 2 / 3
"""Of a forward and backward pass: for every multiplication forward there are two backward (by input, by weight)."""
BUCKET_BYTES = 25 * 2**20
"""DDP's own."""
UNIFORM = ((1.0, 1.0),)


@dataclass(frozen=True)
class Work:
    """What one step asks for, whoever does it."""

    shards: int
    """Equal parts of the global batch."""
    shard_seconds: float
    """Of one shard forward and backward, on one rank that has the node for itself."""
    gradient_bytes: float
    """Of one replica, as they are exchanged."""
    update_seconds: float = 0.0
    """Of the optimizer's step, on one rank that has the node for itself."""
    data_seconds: float = 0.0
    """That a rank waits for the samples of one shard."""
    profile: Sequence[tuple[float, float]] = UNIFORM
    """When gradients are ready, in the order of the backward pass: parts of its time, with their parts of the bytes."""
    bucket_bytes: float = BUCKET_BYTES
    layers: int = 0
    """Not 0: weights are sharded over all ranks and gathered layer by layer, forward and backward (FSDP)."""
    gathered_bytes: float = 0.0
    """Of all weights, where they are sharded."""
    sharded_update: bool = False
    """Whether the ranks of a node share the optimizer's work."""


@dataclass(frozen=True)
class Team:
    """Who does it, and over which links."""

    shape: Shape
    links: Links
    collective: Collective
    cores: float = math.inf
    """Ranks of a node that can compute at once; fewer than its ranks: they take turns."""
    crowding: float = 1.0
    """How much longer a rank takes when all cores compute than alone (memory and caches are shared)."""
    jitter: float = 0.0
    """Standard deviation of a rank's step, as a part of it; everybody waits for the slowest."""
    overlap: float = 1.0
    """Part of the exchange that runs beside the backward pass, if it is in time: 1 where somebody else does it (a GPU's
    copy engines, a free core), 0 where the ranks that compute have to do it."""


@dataclass(frozen=True)
class Phases:
    """Seconds of one step."""

    data: float
    compute: float
    wait: float
    """For the slowest rank."""
    exchange: float
    """What of it is not hidden behind the backward pass."""
    update: float
    hidden: float = 0.0
    """What of the exchange is hidden; no part of the step."""

    @property
    def step(self) -> float:
        """All together."""
        return self.data + self.compute + self.wait + self.exchange + self.update


def step_phases(work: Work, team: Team) -> Phases:
    """The step of a team: it has as many shards to compute as its busiest rank."""
    shape = team.shape
    slower = _slower(team)
    shards = math.ceil(work.shards / shape.size)
    compute = shards * work.shard_seconds * slower
    backward = (
        work.shard_seconds * slower * BACKWARD_SHARE
    )  # only the last shard's: until then sums stay here
    total, late = _fsdp(work, team, compute) if work.layers else _exchange(work, team, backward)
    exposed = team.overlap * late + (1.0 - team.overlap) * total
    working = work.sharded_update and not work.layers
    update = work.update_seconds * slower / (shape.ranks if working else 1)
    wait = team.jitter * slowest_of(shape.size) * compute
    return Phases(shards * work.data_seconds, compute, wait, exposed, update, total - exposed)


def slowest_of(ranks: int) -> float:
    """Expected largest of so many standard normal numbers (Blom's approximation)."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


def with_step(work: Work, team: Team, seconds: float) -> Work:
    """The same work with the shard's seconds that make this team's step take so long: fits the model to one figure."""
    low, high = 0.0, seconds
    for _ in range(80):
        middle = (low + high) / 2
        found = step_phases(_with_shard(work, middle), team).step
        low, high = (middle, high) if found < seconds else (low, middle)
    return _with_shard(work, (low + high) / 2)


def _with_shard(work: Work, seconds: float) -> Work:
    return Work(**{**vars(work), "shard_seconds": seconds})


def _slower(team: Team) -> float:
    """Than a rank that has the node for itself."""
    ranks = team.shape.ranks
    if ranks == 1:
        return 1.0
    busy = min(float(ranks), team.cores)
    full = team.cores if math.isfinite(team.cores) else float(ranks)
    crowded = 1.0 + (team.crowding - 1.0) * (busy - 1.0) / max(full - 1.0, 1.0)
    return crowded * max(1.0, ranks / team.cores)


def _exchange(work: Work, team: Team, backward: float) -> tuple[float, float]:
    """All seconds of the exchange, and those after the backward pass: bucket after bucket, as they get ready."""
    turns = max(1.0, team.shape.ranks / team.cores) if team.overlap < 1.0 else 1.0
    total, free = 0.0, 0.0
    for ready, nbytes in _buckets(work):
        seconds = turns * all_reduce_seconds(nbytes, team.shape, team.links, team.collective)
        free = max(free, ready * backward) + seconds
        total += seconds
    return total, max(0.0, free - backward)


def _buckets(work: Work) -> list[tuple[float, float]]:
    """When each bucket is full, as a part of the backward pass, and its bytes."""
    found: list[tuple[float, float]] = []
    at, held = 0.0, 0.0
    for time_share, byte_share in work.profile:
        nbytes, began = byte_share * work.gradient_bytes, 0.0
        while nbytes - began > 0:
            take = min(work.bucket_bytes - held, nbytes - began)
            began, held = began + take, held + take
            if held >= work.bucket_bytes * (1 - 1e-9):
                found.append((at + time_share * began / nbytes, held))
                held = 0.0
        at += time_share
    if held > 0:
        found.append((1.0, held))
    return found


def _fsdp(work: Work, team: Team, compute: float) -> tuple[float, float]:
    """Sharded weights: a layer is gathered while the one before it computes, and its gradients leave behind it."""
    # An all-gather or a reduce-scatter is half an all-reduce.
    gather = all_reduce_seconds(work.gathered_bytes / work.layers, team.shape, team.links, "ring") / 2
    scatter = all_reduce_seconds(work.gradient_bytes / work.layers, team.shape, team.links, "ring") / 2
    forward = compute * (1.0 - BACKWARD_SHARE) / work.layers
    backward = compute * BACKWARD_SHARE / work.layers
    late = gather + (work.layers - 1) * max(0.0, gather - forward)
    late += (work.layers - 1) * max(0.0, gather + scatter - backward) + scatter
    return work.layers * (2 * gather + scatter), late
