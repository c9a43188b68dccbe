"""A rank's event files: one that is written, and the compacted ones before it.

    rank-0.jsonl            the end of the record; bounded, so that whoever goes on reads little
    rank-0.0000.jsonl.gz    the beginning, compacted: steps in long columns, without their samples
    rank-0.0001.jsonl.gz    …

A part is compacted into a file that appears whole; then the file that is written is replaced by one that begins with
what all parts before it add up to (`PartBegun`). What a kill leaves in between is told apart by the events' numbers.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from dure.base.files import open_plain, write_whole
from dure.observe.events.kinds import Event, PartBegun, StorageUsed, TeamFormed
from dure.observe.events.lines import (
    LONGEST_LINE,
    Newer,
    Recorded,
    Unreadable,
    decode,
    encode,
    encode_all,
    without_samples,
)

PART_BYTES = 4 << 20
"""A file of this size is compacted."""
_TAIL_BYTES = 2 * PART_BYTES
"""Read of the written file when a session begins: all of it, unless it could not be compacted."""
_UNPACKED_BYTES = 16 * PART_BYTES
"""Of one compacted part: more was not made by us."""
_LOOK_BYTES = 4 << 20
_COMPACTED = re.compile(r"\.([0-9]{4,9})\.jsonl\.gz")


@dataclass
class Reading:
    """Reads one rank's events in order, and counts what it left out."""

    path: Path
    skipped: int = 0
    """Lines that told no event: cut short by a crash, damaged or made up."""
    newer: int = 0
    """Of those, lines of a newer version."""

    def records(self, *, recent: bool = False) -> Iterator[Recorded]:
        """Every event that can be read, with its number and time; `recent`: of the last two parts only."""
        read_up_to = -1
        for part in compacted_parts(self.path)[-1 if recent else 0 :]:
            for record in self._of(lines_of_part(part)):
                read_up_to = max(read_up_to, -1 if record.number is None else record.number)
                yield record
        for record in self._of(_lines(self.path, _TAIL_BYTES if recent else None)):
            if record.number is None or record.number > read_up_to:
                yield record

    def last_part(self) -> Iterator[Recorded]:
        """Only those of the file that is written."""
        return self._of(_lines(self.path))

    def _of(self, lines: Iterator[bytes]) -> Iterator[Recorded]:
        for line in lines:
            for record in self.decoded(line):
                if not isinstance(record.event, PartBegun):
                    yield record

    def decoded(self, line: bytes) -> list[Recorded]:
        """What a line tells; nothing, and it is counted, when it cannot be read."""
        try:
            return decode(line)
        except Unreadable as error:
            self.skipped += 1
            self.newer += isinstance(error, Newer)
            return []


def read_events(path: Path) -> Iterator[Event]:
    """The events of one rank, in order; what cannot be read is left out."""
    return (record.event for record in Reading(path).records())


def recent_events(path: Path) -> list[Event]:
    """The last events of one rank: those of the file that is written, and of the part before it."""
    return [record.event for record in Reading(path).records(recent=True)]


@dataclass(frozen=True)
class Totals:
    """What a rank's events add up to, as far as somebody who goes on needs it."""

    next_number: int = 0
    part: int = 0
    """The number of the part that is written."""
    session: int = -1
    steps: int = 0
    storage_requests: int = 0
    storage_bytes: int = 0

    def after(self, records: Iterable[Recorded]) -> Totals:
        """With these events more."""
        number, session, steps = self.next_number, self.session, self.steps
        requests, nbytes = self.storage_requests, self.storage_bytes
        for record in records:
            number = max(number, (number if record.number is None else record.number) + 1)
            match record.event:
                case TeamFormed() as team:
                    session, steps = team.session, team.steps
                case StorageUsed() as used:
                    requests, nbytes = requests + used.requests, nbytes + used.bytes
        return Totals(number, self.part, session, steps, requests, nbytes)

    def head(self, at: float) -> str:
        """The first line of the next part."""
        event = PartBegun(self.part, self.session, self.steps, self.storage_requests, self.storage_bytes)
        return encode(event, at, self.next_number)


def totals_in(path: Path) -> Totals:
    """What the events of a rank add up to, from the file that is written alone; OSError when it cannot be read."""
    totals = Totals()
    try:
        descriptor = open_plain(path)
    except FileNotFoundError:
        return totals
    reading = Reading(path)
    with open(descriptor, "rb") as file:
        head = file.readline(LONGEST_LINE)
        for record in reading.decoded(head):
            if isinstance(record.event, PartBegun):
                begun = record.event
                totals = Totals(
                    record.number or 0,
                    begun.number,
                    begun.session,
                    begun.steps,
                    begun.storage_requests,
                    begun.storage_bytes,
                )
            else:
                totals = totals.after([record])
        _skip_to_tail(file, _TAIL_BYTES)
        for line in _whole_lines(file):
            totals = totals.after(reading.decoded(line))
    return totals


def sessions_in(path: Path) -> int:
    """How often the run was begun or resumed, by one rank's events."""
    try:
        return totals_in(path).session + 1
    except OSError:
        return 0


def compacted_parts(path: Path) -> list[Path]:
    """The compacted parts before the file that is written, in order."""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(path.parent):
            match = _COMPACTED.fullmatch(entry.name.removeprefix(path.stem))
            if (
                entry.name.startswith(path.stem)
                and match is not None
                and entry.is_file(follow_symlinks=False)
            ):
                found.append((int(match[1]), path.with_name(entry.name)))
    return [part for _, part in sorted(found)]


def compacted(path: Path, totals: Totals) -> Path:
    """Where the part that is written will be kept when it is compacted."""
    return path.with_name(f"{path.stem}.{totals.part:04d}.jsonl.gz")


def compact(path: Path, totals: Totals, at: float) -> Totals:
    """Compact the file that is written, and begin the next part; returns the totals to go on with.

    OSError when that cannot be done: then nothing is lost.
    """
    text = encode_all(map(without_samples, Reading(path).last_part()))
    write_whole(compacted(path, totals), gzip.compress(text.encode(), mtime=0))
    following = replace(totals, part=totals.part + 1)
    write_whole(path, following.head(at))
    return following


class Follower:
    """Reads what a rank records while it records it; never waits."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        """`from_end`: only what comes from now on."""
        self.reading = Reading(path)
        self._file: BinaryIO | None = None
        self._rest = b""
        self._too_long = False
        if from_end and (file := self._open()) is not None:
            file.seek(0, os.SEEK_END)
            self._file = file

    def look(self) -> list[Event]:
        """What is new."""
        found: list[Event] = []
        if self._file is None:
            self._file = self._open()
        if self._file is not None:
            replaced = self._is_replaced(self._file)
            found += self._read(self._file)
            if replaced:  # what was written before is read to its end: nobody writes there any more
                self._file.close()
                self._rest, self._file = b"", self._open()
                found += self._read(self._file) if self._file is not None else []
        return found

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> BinaryIO | None:
        try:
            return open(open_plain(self.reading.path), "rb")
        except OSError:
            return None

    def _is_replaced(self, file: BinaryIO) -> bool:
        try:
            return not os.path.samestat(os.fstat(file.fileno()), os.stat(self.reading.path))
        except OSError:
            return False

    def _read(self, file: BinaryIO) -> list[Event]:
        try:
            data = file.read(_LOOK_BYTES)
        except OSError:
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        if lines and self._too_long:
            del lines[0]
            self._too_long = False
        if len(self._rest) > LONGEST_LINE:
            self._rest, self._too_long = b"", True
            self.reading.skipped += 1
        return [
            record.event
            for line in lines
            for record in self.reading.decoded(line + b"\n")
            if not isinstance(record.event, PartBegun)
        ]


def _lines(path: Path, most_bytes: int | None = None) -> Iterator[bytes]:
    try:
        descriptor = open_plain(path)
    except OSError:
        return
    with open(descriptor, "rb") as file:
        _skip_to_tail(file, most_bytes)
        yield from _whole_lines(file)


def _skip_to_tail(file: BinaryIO, most_bytes: int | None) -> None:
    """Of a file that is longer, leave out the beginning, and the line that is cut by that."""
    size = os.fstat(file.fileno()).st_size
    if most_bytes is not None and size > most_bytes:
        file.seek(size - most_bytes)
        file.readline(LONGEST_LINE)


def lines_of_part(path: Path) -> Iterator[bytes]:
    """Lines of a compacted part, whatever they are."""
    try:
        with open(open_plain(path), "rb") as packed, gzip.GzipFile(fileobj=packed) as file:
            yield from _whole_lines(io.BytesIO(file.read(_UNPACKED_BYTES)))
    except (OSError, EOFError, zlib.error):
        yield b"\n"  # counted as a line that cannot be read


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines of a file; one that is too long comes cut, and its rest not at all."""
    try:
        while line := file.readline(LONGEST_LINE):
            yield line
            while line and not line.endswith(b"\n"):
                line = file.readline(LONGEST_LINE)
    except OSError:
        return
