"""Writes one rank's events off the training thread.

Recording never waits: the training thread appends to a bounded buffer, a thread of its own encodes and
writes. When the disk refuses, training goes on, the loss is counted, and the run is marked.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dure.base.files import open_own
from dure.base.say import say
from dure.observe.events.kinds import Event, Noted, Stepped
from dure.observe.events.lines import LONGEST_LINE, Recorded, Unreadable, decode, encode_all
from dure.observe.events.parts import PART_BYTES, Totals, compact, compacted, totals_in

_LOOK_SECONDS = 0.1
_HOLD_SECONDS = 0.5
"""Steps wait so long for others to share a line with; everything else is written at the next look."""
_HOLD_STEPS = 256
_OPEN_SECONDS = 5.0
_BRING_IN_SECONDS = 30.0


@dataclass
class Recorder:
    """One rank's events, written in the background."""

    path: Path | None
    """None: nothing is recorded (a script without a run folder)."""
    capacity: int = 10_000
    lost: int = 0
    """Events that could not be kept; the run is then incompletely recorded."""
    part_bytes: int = PART_BYTES
    """The file is compacted when it has grown to this."""
    _buffer: deque[Recorded] = field(default_factory=deque)
    """Numbered from 0; `_found` says what comes before."""
    _numbers: int = 0
    _urgent: bool = False
    """Whether there is more than steps in the buffer."""
    _wake: threading.Event = field(default_factory=threading.Event)
    _leaving: Sequence[Recorded] = ()
    """Those that are being written right now."""
    _found: Totals = field(default_factory=Totals)
    """Of what was there before this session."""
    _opened: threading.Event = field(default_factory=threading.Event)
    """`_found` is known."""
    _totals: Totals = field(default_factory=Totals)
    """Of all that was recorded, as far as the disk was tried."""
    _idle: threading.Event = field(default_factory=threading.Event)
    """All that was there at the last look is written."""
    _patient: bool = True
    _compact_at: int = 0
    _told: bool = False
    _closing: bool = False
    _thread: threading.Thread | None = None

    @property
    def storage(self) -> tuple[int, int]:
        """Requests and bytes of all that this rank asked of the storage, in earlier sessions too."""
        return self._totals.storage_requests, self._totals.storage_bytes

    def record(self, event: Event) -> None:
        """Keep an event; returns at once, whatever the disk does."""
        self._keep(time.monotonic(), event)

    def unwritten(self) -> Callable[[], str]:
        """The events that may not be on disk yet, from the training thread; a few may be there already. What is
        returned encodes them, in whatever thread."""
        if self._thread is None or not self._opened.wait(_OPEN_SECONDS if self._patient else 0.0):
            self._patient = self._thread is None  # a disk that hangs is waited for once
            return lambda: ""
        pending = list(self._buffer)  # first: what leaves the buffer meanwhile is found below
        leaving = list(self._leaving)

        def encoded() -> str:
            known = {record.number: record for record in (*leaving, *pending)}
            return encode_all(self._numbered(known.values()))

        return encoded

    def bring_in(self, lines: str) -> None:
        """Record what an earlier process of this rank had, and may not have brought to the disk."""
        if self.path is None or not lines:
            return
        self._begin()
        if not self._opened.wait(_BRING_IN_SECONDS):  # the disk hangs
            self.lost += lines.count("\n")
            return
        for line in lines.splitlines(keepends=True):
            try:
                records = decode(line.encode())
            except Unreadable:
                continue
            for record in records:
                if record.number is not None and record.number >= self._found.next_number:
                    self._keep(record.at, record.event)

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

    def _keep(self, at: float, event: Event) -> None:
        if self.path is None:
            return
        if len(self._buffer) >= self.capacity:
            self.lost += 1
            return
        self._buffer.append(Recorded(self._numbers, at, event))
        self._numbers += 1
        self._urgent |= not isinstance(event, Stepped)
        self._begin()

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="events", daemon=True)
            self._thread.start()

    def _numbered(self, records: Iterable[Recorded]) -> list[Recorded]:
        first = self._found.next_number
        return [record._replace(number=first + (record.number or 0)) for record in records]

    def _write_all(self) -> None:
        assert self.path is not None
        self._open(self.path)
        while True:
            self._wake.wait(_LOOK_SECONDS)
            closing = self._closing
            if not closing:
                self._wake.clear()
            asked = not self._idle.is_set()
            if closing or asked or self._is_due():
                self._urgent = False
                self._write_batch(self.path)
            if asked:
                self._idle.set()
            if closing and not self._buffer:
                return

    def _is_due(self) -> bool:
        if not self._buffer:
            return False
        oldest = self._buffer[0].at
        return self._urgent or len(self._buffer) >= _HOLD_STEPS or time.monotonic() - oldest >= _HOLD_SECONDS

    def _open(self, path: Path) -> None:
        """Find out what is there; finish what a kill cut short."""
        self._compact_at = self.part_bytes
        try:
            _mend(path)
            self._found = self._totals = totals_in(path)
            if compacted(path, self._totals).exists():  # a kill came before the next part was begun
                self._totals = compact(path, self._totals, time.monotonic())
        except OSError as error:
            self._tell(error)
        finally:
            self._opened.set()

    def _write_batch(self, path: Path) -> None:
        batch = list(self._buffer)
        if not batch:
            return
        self._leaving = batch
        for _ in batch:  # never in neither place: a state that is kept now must find them
            self._buffer.popleft()
        records = self._numbered(batch)
        self._totals = self._totals.after(records)  # also when the disk refuses: they happened
        try:
            size = _append(path, encode_all(records))
        except OSError as error:
            self.lost += len(batch)
            self._tell(error)
            for record in batch:
                if isinstance(record.event, Noted):  # whoever reads events would have told the user
                    say(record.event.text, urgent=True)
            return
        finally:
            self._leaving = ()
        if size >= self._compact_at:
            try:
                self._totals = compact(path, self._totals, time.monotonic())
                self._compact_at = self.part_bytes
            except OSError:  # no room for it: the file grows on
                self._compact_at = size + self.part_bytes // 4

    def _tell(self, error: OSError) -> None:
        if not self._told:
            self._told = True
            say(
                f"cannot record events in {self.path}: {error.strerror or error}; training goes on",
                urgent=True,
            )


def _append(path: Path, lines: str) -> int:
    """Returns the size of the file then."""
    descriptor = open_own(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        size = os.fstat(descriptor).st_size
        left = memoryview(lines.encode())
        try:
            while left:
                left = left[os.write(descriptor, left) :]
        except OSError:
            with contextlib.suppress(OSError):  # half a line would spoil the next one
                os.ftruncate(descriptor, size)
            raise
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _mend(path: Path) -> None:
    """Take off half a line that a killed session left, or it would spoil the next one's first."""
    try:
        descriptor = open_own(path, os.O_RDWR)
    except FileNotFoundError:
        return
    with open(descriptor, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LONGEST_LINE))
        tail = file.read(LONGEST_LINE)
        if tail and not tail.endswith(b"\n"):
            file.truncate(size - len(tail) + tail.rfind(b"\n") + 1)
