"""One state in memory that outlives the ranks, and the proof that it is whole.

Every rank of a node writes its part of the bytes, then a record that says so. A slot is whole when the records
of all parts are there and speak of the same step: no rank has to wait for another. A rank that is killed in
the middle leaves no record; one that wrote at random leaves bytes that do not have the recorded fingerprint.

    records    64 bytes per part
    journals   of each part: which bytes are its own, their fingerprint, what the rank saw of the next part in its own
               replica, events that may not be on disk yet
    facts      of the state, as JSON
    tensors    of the state

The file has holes: what is never written takes no memory.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from dure.base.errors import CheckpointError
from dure.checkpoint.state import LINE_BYTES, State, Table, WholeState, disagreeing

_MOST_PARTS = 1024
_RECORD_BYTES = 64
_JOURNAL_BYTES = 1 << 20
_FACTS_BYTES = 64 << 20
_FINGERPRINT_DIGITS = 16
_RECORD = struct.Struct("<IIqQQQQ")
_CHECK = struct.Struct("<I")


@dataclass(frozen=True)
class Record:
    """Says that one rank's part of a state is in the slot."""

    part: int
    parts: int
    step: int
    facts_bytes: int
    facts_hash: int
    journal_bytes: int
    journal_hash: int

    def pack(self) -> bytes:
        """With a check sum: a record that was cut short is none."""
        body = _RECORD.pack(*vars(self).values())
        return body + _CHECK.pack(zlib.crc32(body))

    @classmethod
    def unpack(cls, data: bytes) -> Record | None:
        """None when there is no whole record."""
        body = data[: _RECORD.size]
        (check,) = _CHECK.unpack_from(data, _RECORD.size)
        return cls(*_RECORD.unpack(body)) if check == zlib.crc32(body) and any(body) else None


class Slot:
    """This rank's view of one slot; `path` is how it is opened."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._map: mmap.mmap | None = None
        self._clean: tuple[int, Table] | None = None
        """What the gaps between this rank's tensors are known to be zero for."""

    def write(self, state: State, part: int, parts: int, events: str) -> None:
        """Put this rank's part in place; whole when all `parts` have done so."""
        self.fill(state, part, parts)("", events)

    def fill(self, state: State, part: int, parts: int) -> Callable[[str, str], None]:
        """Copy this rank's part: all that a step has to wait for. What it returns signs for the copy, given what this
        rank saw of the next part in its own replica, and its events that may not be on disk yet; it takes a
        fingerprint of the copy, which is all that it needs, and may run in another thread."""
        facts = f"[{json.dumps(state.facts)}, {state.table.json}]".encode()
        if parts > _MOST_PARTS or len(facts) > _FACTS_BYTES:
            raise CheckpointError(
                f"a state of {parts} parts and {len(facts)} bytes of facts cannot be kept in memory"
            )
        runs = _joined((piece.offset, piece.nbytes) for piece in state.pieces)
        _fitting(runs, "")
        step = int(state.facts["step"])
        memory = self._mapped(_tensors_at(parts) + state.table.nbytes)
        record_at = part * _RECORD_BYTES
        memory[record_at : record_at + _RECORD_BYTES] = bytes(_RECORD_BYTES)  # no longer whole
        if part == 0:
            at = _facts_at(parts)
            memory[at : at + len(facts)] = facts
        tensors = _bytes_of(memory, _tensors_at(parts), state.table.nbytes)
        if self._clean != (parts, state.table):
            for before, after in itertools.pairwise(sorted((p.offset, p.nbytes) for p in state.pieces)):
                if (end := sum(before)) < after[0] < end + LINE_BYTES:
                    tensors[end : after[0]].zero_()
            self._clean = (parts, state.table)
        state.copy_into(tensors)
        alike, all_alike = (
            _joined((p.offset, p.nbytes) for p in state.alike),
            len(state.alike) == len(state.pieces),
        )

        def sign(neighbour: str, events: str) -> None:
            shared = _fingerprint(tensors, alike)
            whole = shared if all_alike else _fingerprint(tensors, runs)
            seen = {"fingerprint": whole, "shared": shared, "witnessed": neighbour}
            told = json.dumps({**_fitting(runs, events), **seen}).encode()
            at = _journal_at(part)
            memory[at : at + len(told)] = told
            hashes = xxhash.xxh3_64_intdigest(facts), xxhash.xxh3_64_intdigest(told)
            packed = Record(part, parts, step, len(facts), hashes[0], len(told), hashes[1]).pack()
            memory[record_at : record_at + len(packed)] = packed

        return sign

    def buffers(self, state: State, parts: int) -> list[torch.Tensor]:
        """Where `fill` will copy this rank's part to."""
        memory = self._mapped(_tensors_at(parts) + state.table.nbytes)
        tensors = _bytes_of(memory, _tensors_at(parts), state.table.nbytes)
        runs = _joined((piece.offset, piece.nbytes) for piece in state.pieces)
        return [tensors[start : start + nbytes] for start, nbytes in runs]

    def records(self) -> list[Record] | None:
        """Those of all parts, if all speak of the same state."""
        size = os.fstat(self._descriptor).st_size
        if size == 0:
            return None
        memory = self._mapped(size)
        found: list[Record] = []
        while not found or len(found) < found[0].parts:
            at = len(found) * _RECORD_BYTES
            record = Record.unpack(memory[at : at + _RECORD_BYTES])
            if record is None or record.part != len(found) or not 0 < record.parts <= _MOST_PARTS:
                return None
            found.append(record)
        alike = {(record.parts, record.step, record.facts_bytes, record.facts_hash) for record in found}
        return found if len(alike) == 1 else None

    def sound(self, record: Record) -> bool:
        """Whether the bytes of one part are still those that were written."""
        memory = self._mapped(os.fstat(self._descriptor).st_size)
        journal = self._journal(record)
        if journal is None:
            return False
        tensors = _bytes_of(memory, _tensors_at(record.parts), len(memory) - _tensors_at(record.parts))
        return _fingerprint(tensors, journal["runs"]) == str(journal["fingerprint"])

    def shared(self) -> tuple[str, ...]:
        """The fingerprints of all parts, by part, as far as other ranks hold the same; none when the rank before has
        other bits of one, or when they are not all there yet."""
        records = self.records()
        journals = [self._journal(record) for record in records or []]
        told = [journal for journal in journals if journal is not None]
        shared = [str(journal.get("shared", "")) for journal in told]
        neighbours = [str(journal.get("witnessed", "")) for journal in told]
        if len(told) < len(journals) or (len(told) > 1 and disagreeing(shared, neighbours)):
            return ()
        return tuple(shared)

    def events(self, record: Record) -> str:
        """What a part's rank had recorded when it wrote it, and might not have brought to the disk."""
        journal = self._journal(record)
        return "" if journal is None else str(journal["events"])

    def state(self, record: Record) -> WholeState:
        """The state itself; its tensors are the slot's own memory, until that slot is written again."""
        memory = self._mapped(os.fstat(self._descriptor).st_size)
        at = _facts_at(record.parts)
        text = memory[at : at + record.facts_bytes]
        if xxhash.xxh3_64_intdigest(text) != record.facts_hash:
            raise CheckpointError("the facts of the state in memory are damaged")
        facts, told = json.loads(text)
        table = Table.from_plain(told)
        return WholeState(facts, table, _bytes_of(memory, _tensors_at(record.parts), table.nbytes))

    @property
    def held_bytes(self) -> int:
        """Memory that the slot takes already."""
        return os.fstat(self._descriptor).st_blocks * 512

    def close(self) -> None:
        """Let go of the file; the mapping lives as long as tensors look at it."""
        os.close(self._descriptor)

    def _journal(self, record: Record) -> dict[str, Any] | None:
        memory = self._mapped(os.fstat(self._descriptor).st_size)
        at = _journal_at(record.part)
        text = memory[at : at + record.journal_bytes]
        if xxhash.xxh3_64_intdigest(text) != record.journal_hash:
            return None
        journal: dict[str, Any] = json.loads(text)
        return journal

    def _mapped(self, nbytes: int) -> mmap.mmap:
        """At least so many bytes of the slot. It never shrinks: others have mapped it too."""
        if self._map is None or len(self._map) < nbytes:
            size = max(os.fstat(self._descriptor).st_size, nbytes)
            if size > os.fstat(self._descriptor).st_size:
                os.ftruncate(self._descriptor, size)
            self._map = mmap.mmap(self._descriptor, size)
        return self._map


def _journal_at(part: int) -> int:
    return _MOST_PARTS * _RECORD_BYTES + part * _JOURNAL_BYTES


def _facts_at(parts: int) -> int:
    return _journal_at(parts)


def _tensors_at(parts: int) -> int:
    return _facts_at(parts) + _FACTS_BYTES


def _bytes_of(memory: mmap.mmap, start: int, nbytes: int) -> torch.Tensor:
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=start)


def _joined(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbouring (start, length) as one; the gaps between tensors, shorter than a line, belong to nobody."""
    joined: list[tuple[int, int]] = []
    for start, nbytes in sorted(runs):
        if joined and start - (joined[-1][0] + joined[-1][1]) < LINE_BYTES:
            first = joined[-1][0]
            joined[-1] = (first, start + nbytes - first)
        else:
            joined.append((start, nbytes))
    return joined


def _fingerprint(tensors: torch.Tensor, runs: Sequence[Sequence[int]]) -> str:
    digest = xxhash.xxh3_64()
    whole = tensors.numpy()
    for start, nbytes in runs:
        digest.update(whole[start : start + nbytes].data)
    return digest.hexdigest()


def _fitting(runs: list[tuple[int, int]], events: str) -> dict[str, Any]:
    """A part's journal, still without its fingerprint, that has room in the slot."""
    for told in (events, ""):  # events that are many are mostly on disk already
        blank = "0" * _FINGERPRINT_DIGITS
        journal = {"runs": runs, "fingerprint": blank, "shared": blank, "witnessed": blank, "events": told}
        if len(json.dumps(journal)) <= _JOURNAL_BYTES:  # json.dumps gives ASCII: as many bytes as characters
            return journal
    raise CheckpointError(f"a state in {len(runs)} pieces per rank cannot be kept in memory")
