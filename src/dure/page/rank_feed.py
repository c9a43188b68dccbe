"""Reads one rank's events from where it was: the compacted parts, then the file that is written.

Every event has a number, so what was read is known for sure, whatever was compacted meanwhile. With each complete chunk
of steps the place is kept in an index file: the next page goes on from there. Nothing that is read is believed: lines
that tell no event are counted, a line without end is passed over.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from dure.base.files import open_plain, read_at_most, write_whole
from dure.observe.events import (
    CheckpointSaved,
    Ended,
    Evaluated,
    Event,
    MemoryUsed,
    Noted,
    PartBegun,
    Proved,
    ShardAudited,
    StorageUsed,
    TeamFormed,
    WeightsLoaded,
    compacted_parts,
    lines_of_part,
)
from dure.observe.events.lines import LONGEST_LINE
from dure.page.cache import Cache
from dure.page.columns import AT, Steps, read_line
from dure.page.pyramid import CHUNK, Pyramid, Stretch

_FORMAT = "dure-page-index-1"
_READ_BYTES = 1 << 20
_LONGEST_INDEX = 64 << 20
_MOST_KEPT = 4096
"""Events of a kind: the last ones."""
_MOST_SAMPLES = 200_000
"""Sample numbers that are held: those of the last epochs."""
_KEPT = (
    TeamFormed,
    Proved,
    ShardAudited,
    Evaluated,
    StorageUsed,
    WeightsLoaded,
    CheckpointSaved,
    MemoryUsed,
    Noted,
    Ended,
)


@dataclass
class Kept:
    """An event that is no step, as plain values."""

    number: int
    """Of all that this feed kept, from 0."""
    kind: str
    after: int
    """The last step before it; -1: none."""
    values: dict[str, Any]


@dataclass
class RankFeed:
    """One rank's record, as far as it was read."""

    path: Path
    rank: int
    cache: Cache
    skipped: int = 0
    """Lines that told no event."""
    pyramid: Pyramid = field(init=False)
    last_at: float = 0.0
    """The rank's own clock at its last event."""
    events: dict[str, deque[Kept]] = field(default_factory=dict)
    """By kind, the last ones."""
    kept: int = 0
    samples: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    """By epoch, of each step the rank's sample numbers; of the last epochs, where they were recorded."""
    epoch: int = -1
    storage: tuple[int, int] = (0, 0)
    last_samples: int = 0
    """Of all ranks, in the last step."""
    _next: int = 0
    """The number of the next event."""
    _parts: int = 0
    """Compacted parts that were read."""
    _step_at: float | None = None
    """When the last step was recorded."""
    _file: BinaryIO | None = None
    _rest: bytes = b""
    _passing: bool = False
    """Within a line that is too long."""
    _held_samples: int = 0

    def __post_init__(self) -> None:
        self.pyramid = Pyramid(self.cache, self.rank)
        self._restore()

    def look(self, seconds: float = 0.5) -> bool:
        """Read what is new, for so long at most; whether there may be more at once."""
        deadline = time.monotonic() + seconds
        for number, part in enumerate(compacted_parts(self.path)):
            if number < self._parts:
                continue
            self._close()  # it was this part before; what is known of it is told by its events' numbers
            for line in lines_of_part(part):
                self._take(line)
            self._parts = number + 1
            if time.monotonic() > deadline:
                return True
        return self._follow(deadline)

    def close(self) -> None:
        """Let go of the file."""
        self._close()

    def _follow(self, deadline: float) -> bool:
        if self._file is not None and self._is_replaced():
            self._close()
            return True  # there may be another compacted part, first
        if self._file is None:
            try:
                self._file = os.fdopen(open_plain(self.path), "rb")
            except OSError:
                return False
        while time.monotonic() < deadline:
            try:
                data = self._file.read(_READ_BYTES)
            except OSError:
                return False
            if not data:
                return False
            *lines, rest = (self._rest + data).split(b"\n")
            self._rest = rest
            if lines and self._passing:
                del lines[0]
                self._passing = False
            if len(self._rest) > LONGEST_LINE:
                self.skipped += not self._passing
                self._rest, self._passing = b"", True
            elif self._passing:
                self._rest = b""
            for line in lines:
                self._take(line + b"\n")
        return True

    def _is_replaced(self) -> bool:
        assert self._file is not None
        try:
            return not os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path))
        except OSError:
            return False

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._rest, self._passing = None, b"", False

    def _take(self, line: bytes) -> None:
        try:
            told = read_line(line)
        except ValueError:
            self.skipped += 1
            return
        if isinstance(told, Steps):
            self._take_steps(told)
            return
        for record in told:
            if record.number is not None:
                if record.number < self._next and not isinstance(record.event, PartBegun):
                    continue
                self._next = max(self._next, record.number + (not isinstance(record.event, PartBegun)))
            self.last_at = record.at
            self._keep(record.event)

    def _take_steps(self, steps: Steps) -> None:
        known = 0
        if steps.number is not None:
            known = min(max(0, self._next - steps.number), len(steps))
            self._next = max(self._next, steps.number + len(steps))
        if known == len(steps):
            return
        table = steps.table
        if known == 0 and self._step_at is not None and 0 <= steps.began_at - self._step_at < 1e6:
            table[AT["span"], 0] = (steps.began_at - self._step_at) * 1e6
        self._step_at = self.last_at = steps.ended_at
        self.epoch = steps.epoch
        own = table[AT["samples"], -1]
        self.last_samples = int(own) if 0 <= own < 1 << 40 else 0
        if steps.ids is not None:
            self._hold_samples(steps.epoch, steps.ids[known:])
        before = len(self.pyramid)
        try:
            for chunk in self.pyramid.append(steps.first + known, table[:, known:]):
                if steps.number is not None:  # events without numbers (version 1) are read again each time
                    self._save(steps.number + known + (chunk + 1) * CHUNK - before)
        except ValueError:
            self.skipped += 1

    def _hold_samples(self, epoch: int, ids: tuple[tuple[int, ...], ...]) -> None:
        self.samples.setdefault(epoch, []).extend(ids)
        self._held_samples += sum(map(len, ids))
        while self._held_samples > _MOST_SAMPLES and len(self.samples) > 1:
            oldest = min(self.samples)
            self._held_samples -= sum(map(len, self.samples.pop(oldest)))

    def _keep(self, event: Event) -> None:
        if isinstance(event, TeamFormed):
            self._step_at = None  # another process, perhaps another machine: its clock is another
            self.samples.clear()  # a session's epochs begin again at its first step
            self._held_samples = 0
        if isinstance(event, StorageUsed):
            self.storage = (self.storage[0] + event.requests, self.storage[1] + event.bytes)
        if isinstance(event, PartBegun) and self._next == 0:
            self.storage = (event.storage_requests, event.storage_bytes)
        if not isinstance(event, _KEPT):
            return
        self._append(event.kind, self.pyramid.last_step, _plain(vars(event)))

    def _append(self, kind: str, after: int, values: dict[str, Any]) -> None:
        self.events.setdefault(kind, deque(maxlen=_MOST_KEPT)).append(Kept(self.kept, kind, after, values))
        self.kept += 1

    @property
    def _index(self) -> Path:
        return self.cache.path / f"rank-{self.rank}.index.json"

    def _save(self, following: int) -> None:
        """Keep the place right after the last complete chunk; `following` is the number of the event there."""
        kept = sorted(
            (one for of_kind in self.events.values() for one in of_kind), key=lambda one: one.number
        )
        index = {
            "format": _FORMAT,
            "first_line": self._first_line(),
            "chunks": self.pyramid.chunks,
            "stretches": [[one.first, one.place, one.length] for one in self.pyramid.stretches],
            "parts": self._parts,
            "next": following,
            "events": [[one.kind, one.after, one.values] for one in kept],
            "storage": self.storage,
            "skipped": self.skipped,
        }
        write_whole(self._index, json.dumps(index))

    def _first_line(self) -> str:
        """What tells this record from another run's in a folder of the same name."""
        parts = compacted_parts(self.path)
        if parts:
            return next(lines_of_part(parts[0]), b"")[:4096].decode(errors="replace")
        try:
            with open(open_plain(self.path), "rb") as file:
                return file.readline(4096).decode(errors="replace")
        except OSError:
            return ""

    def _restore(self) -> None:
        """Go on from the index, when it is of this record; else from the beginning."""
        try:
            index = json.loads(read_at_most(self._index, _LONGEST_INDEX))
            if index["format"] != _FORMAT or index["first_line"] != self._first_line():
                return
            chunks, rows = int(index["chunks"]), int(index["chunks"]) * CHUNK
            stretches = [
                Stretch(first, place, min(length, rows - place))
                for first, place, length in index["stretches"]
                if place < rows
            ]
            events = [(str(kind), int(after), dict(values)) for kind, after, values in index["events"]]
            requests, nbytes = index["storage"]
            parts, following, skipped = int(index["parts"]), int(index["next"]), int(index["skipped"])
            self.pyramid.restore(chunks, stretches)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.pyramid = Pyramid(self.cache, self.rank)
            return
        for kind, after, values in events:
            self._append(kind, after, values)
        self.storage, self.skipped = (requests, nbytes), skipped
        self._parts, self._next = parts, following


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """As JSON can say it."""
    return {name: _number(value) for name, value in values.items()}


def _number(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(name): _number(inner) for name, inner in value.items()}
    return value
