"""The events of a rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict


@dataclass(frozen=True)
class Event:
    """Something that happened in one rank."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")
    """For whoever reads them: lines are believed only when every field is there and has its type."""
    kind: ClassVar[str]


@dataclass(frozen=True)
class TeamFormed(Event):
    """The shape of the team, and what its bits depend on."""

    kind = "team"
    rank: int
    ranks: int
    shards: int
    threads: int
    device: str
    host: str
    pid: int
    sync: bool
    recipe: str
    parameters: int
    samples: int
    steps: int
    session: int = 0
    """How often this run was resumed before; events up to the next TeamFormed belong to it."""
    start: int = 0
    """The first step of this session: earlier sessions' work from there on is done again."""
    node: int = 0
    """The rank's node, from 0."""


@dataclass(frozen=True)
class Stepped(Event):
    """One optimizer step."""

    kind = "step"
    epoch: int
    step: int
    """Counted over the whole run, from 0."""
    loss: float
    """Mean over the global batch; the rank's own mean when sync is off."""
    samples: int
    """Of this rank."""
    samples_of_batch: int
    """Of all ranks."""
    seconds: dict[str, float]
    """By phase, in order: save, data, compute, exchange, update; in whole microseconds. `save` is what saving after the
    step before took of this thread. `wait` is the part of `exchange` that the rank waited for others: who comes last
    waits least."""
    lr: float
    grad_norm: float | None
    ids: tuple[int, ...] | None
    """The samples that this rank trained on; None when there are many, and in compacted parts."""
    mark: str | None
    """Hash of those samples; hashes of ranks and steps add up (see `shards.ledger_mark`). None in compacted parts: the
    ledger is kept in the run's states."""


@dataclass(frozen=True)
class Proved(Event):
    """All replicas compared their fingerprints."""

    kind = "proof"
    step: int
    fingerprint: str
    """Of this rank's parameters, buffers and optimizer state."""
    agree: bool


@dataclass(frozen=True)
class ShardAudited(Event):
    """This rank computed another rank's shard again, and the gradients' bits were compared."""

    kind = "audit"
    step: int
    shard: int
    owner: int
    """The rank whose shard it is."""
    agree: bool
    wrong: int
    """The rank that computed wrongly; -1: none, or it cannot be told."""
    tensor: str
    """The first that differed; "" where all are the same."""
    words: str
    """What is wrong, for people; "" where nothing is."""


@dataclass(frozen=True)
class Evaluated(Event):
    """The model was evaluated."""

    kind = "eval"
    step: int
    metrics: dict[str, float]
    samples: int
    """Of this rank."""
    samples_of_all: int
    mark: str


@dataclass(frozen=True)
class Loading(Event):
    """Weights on their way into this rank's model."""

    kind = "loading"
    bytes: int
    """Here by now."""
    of_bytes: int
    seconds: float
    """Since loading began."""


@dataclass(frozen=True)
class WeightsLoaded(Event):
    """All ranks hold the same weights."""

    kind = "weights"
    how: str
    """Who read them: slices, every-rank or rank0."""
    fingerprint: str
    bytes: int
    seconds: dict[str, float]
    """By stage."""
    built: str
    """How the model was built, and why so."""


@dataclass(frozen=True)
class StorageUsed(Event):
    """This rank read shared storage. No such event: it never did."""

    kind = "storage"
    rank: int
    location: str
    what: str
    """What was read: "weights"."""
    requests: int
    bytes: int
    seconds: float
    """Spent waiting for the storage."""


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A checkpoint was written, off the step path; or could not be."""

    kind = "checkpoint"
    step: int
    """The next one: so many are in it."""
    name: str | None
    """None: it could not be saved, and nothing changed."""
    trouble: str | None
    bytes: int
    seconds: float


@dataclass(frozen=True)
class MemoryUsed(Event):
    """What this rank's process holds; now and then."""

    kind = "memory"
    step: int
    bytes: int
    """Resident, shared memory among it."""


@dataclass(frozen=True)
class Noted(Event):
    """Something the user should know."""

    kind = "note"
    text: str


@dataclass(frozen=True)
class Ended(Event):
    """The rank is done."""

    kind = "end"
    steps: int
    fingerprint: str
    weights_sha256: str
    lost_events: int = 0


@dataclass(frozen=True)
class PartBegun(Event):
    """The first line of an event file that follows a compacted one: what those before it add up to."""

    kind = "part"
    number: int
    """Of this part, from 0."""
    session: int
    """Of the last TeamFormed; -1 when there was none."""
    steps: int
    """Of the whole run, as the last TeamFormed says."""
    storage_requests: int
    """Of all StorageUsed."""
    storage_bytes: int
