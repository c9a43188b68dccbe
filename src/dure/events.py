"""What a rank records: typed events, one JSON object a line. Everything people see derives from them.

Recording never waits: the training thread appends to a bounded buffer, a thread of its own encodes and
writes. When the disk refuses, training goes on, the loss is counted, and the run is marked.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from dure.say import say

VERSION = 1
"""Of the schema below; readers refuse a newer one."""
_LONGEST_LINE = 1 << 20


@dataclass(frozen=True)
class Event:
    """Something that happened in one rank. `at` is that rank's own monotonic clock, in seconds."""

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
    """By phase: data, compute, exchange, update."""
    lr: float
    grad_norm: float | None
    ids: tuple[int, ...] | None
    """The samples that this rank trained on; None when there are many."""
    mark: str
    """Hash of those samples; hashes of ranks and steps add up (see `shards.ledger_mark`)."""


@dataclass(frozen=True)
class Proved(Event):
    """All replicas compared their fingerprints."""

    kind = "proof"
    step: int
    fingerprint: str
    """Of this rank's parameters, buffers and optimizer state."""
    agree: bool


@dataclass(frozen=True)
class Evaluated(Event):
    """The model was judged on the evaluation data."""

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


@dataclass
class Recorder:
    """Writes one rank's events off the training thread."""

    path: Path | None
    """None: nothing is recorded (a script without a run folder)."""
    capacity: int = 10_000
    lost: int = 0
    """Events that could not be kept; the run is then incompletely recorded."""
    _buffer: deque[tuple[float, Event]] = field(default_factory=deque)
    _wake: threading.Event = field(default_factory=threading.Event)
    _leaving: str = ""
    """Lines that are being written right now."""
    _idle: threading.Event = field(default_factory=threading.Event)
    """All that was there at the last look is written."""
    _mended: bool = False
    _closing: bool = False
    _thread: threading.Thread | None = None

    def record(self, event: Event) -> None:
        """Keep an event; returns at once, whatever the disk does."""
        if self.path is None:
            return
        if len(self._buffer) >= self.capacity:
            self.lost += 1
            return
        self._buffer.append((time.monotonic(), event))
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="events", daemon=True)
            self._thread.start()

    def unwritten(self) -> str:
        """The lines that may not be on disk yet, from the training thread; a few may be there already."""
        pending = list(self._buffer)  # first: what leaves the buffer meanwhile is found below
        leaving = self._leaving
        return leaving + "".join(encode(event, at) for at, event in pending)

    def bring_in(self, lines: str) -> None:
        """Record what an earlier process of this rank had, and may not have brought to the disk."""
        if self.path is None:
            return
        try:
            known = set(self.path.read_text(encoding="utf-8").splitlines()) if self.path.exists() else set()
            self._append("".join(line + "\n" for line in lines.splitlines() if line not in known))
        except OSError:
            self.lost += lines.count("\n")

    def flush(self, deadline_seconds: float = 5.0) -> None:
        """Wait until what was recorded so far is written, or could not be; not on the training thread."""
        if self._thread is None:
            return
        deadline = time.monotonic() + deadline_seconds
        self._idle.clear()
        self._wake.set()
        while not self._idle.wait(0.05) and time.monotonic() < deadline:
            self._wake.set()

    def close(self, deadline_seconds: float = 5.0) -> None:
        """Write what is left, waiting at most `deadline_seconds` for a slow disk."""
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(deadline_seconds)
            self.lost += len(self._buffer) if self._thread.is_alive() else 0

    def _write_all(self) -> None:
        told = False
        while True:
            self._wake.wait(0.1)
            closing = self._closing
            if not closing:
                self._wake.clear()
            asked = not self._idle.is_set()
            batch = list(self._buffer)
            try:
                self._leaving = "".join(encode(event, at) for at, event in batch)
                for _ in batch:  # never in neither place: a state that is kept now must find them
                    self._buffer.popleft()
                self._append(self._leaving)
                self._leaving = ""
            except OSError as error:
                self.lost += len(batch)
                if not told:
                    say(f"cannot record events in {self.path}: {error}; training goes on")
                told = True
            if asked:
                self._idle.set()
            if closing and not self._buffer:
                return

    def _append(self, lines: str) -> None:
        if lines and self.path is not None:
            if not self._mended:
                _mend(self.path)
                self._mended = True
            with self.path.open("a", encoding="utf-8") as file:
                file.write(lines)


def _mend(path: Path) -> None:
    """Take off half a line that a killed session left, or it would spoil the next one's first."""
    size = path.stat().st_size if path.is_file() else 0
    if size == 0:
        return
    with path.open("r+b") as file:
        file.seek(max(0, size - _LONGEST_LINE))
        tail = file.read(_LONGEST_LINE)
        if not tail.endswith(b"\n"):
            file.truncate(size - len(tail) + tail.rfind(b"\n") + 1)


def sessions_in(path: Path) -> int:
    """How often the run was begun or resumed, by one rank's events; a look that decodes nothing."""
    mark = f'"kind": "{TeamFormed.kind}"'.encode()
    try:
        with path.open("rb") as file:
            return sum(mark in line[:40] for line in file)
    except FileNotFoundError:
        return 0


def encode(event: Event, at: float) -> str:
    """One line of a rank's event file."""
    return json.dumps({"v": VERSION, "kind": event.kind, "at": round(at, 6), **vars(event)}) + "\n"


_KINDS: dict[str, type[Event]] = {kind.kind: kind for kind in Event.__subclasses__()}


def read_events(path: Path) -> Iterator[Event]:
    """The events of one rank, in order; a line that a crash cut short ends the reading."""
    try:
        file = path.open(encoding="utf-8")
    except OSError:
        return
    with file:
        for line in file:
            event = decode(line)
            if event is None:
                return
            yield event


def decode(line: str) -> Event | None:
    """The inverse of `encode`; None for half a line."""
    if not line.endswith("\n"):
        return None
    try:
        raw: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    if raw.pop("v") > VERSION:
        raise ValueError("these events were written by a newer dure; read them with that version")
    raw.pop("at")
    if isinstance(raw.get("ids"), list):
        raw["ids"] = tuple(raw["ids"])
    return _KINDS[raw.pop("kind")](**raw)
