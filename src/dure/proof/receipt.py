"""The receipt of a run: one chain of SHA-256 over its steps, written while it trains. Needs no torch.

`receipt/` in the run's folder has
    head            JSON: recipe, versions, image, job, shards. The chain begins with its hash.
    steps           records of the same size, each ending with the SHA-256 of the record before's and its own body
    checkpoints     JSON lines: roots of the states that were saved, and where in the chain
    sessions        JSON lines: when, and on how many ranks; the only place with times
    signature       JSON, once it was signed

A step's record has its loss, the marks of its samples and of what they contain, and by lane the losses and the
gradients' fingerprints. A lane is a shard, or with more than eight of them a run of shards. A root's record has the
Merkle roots over all tensors of the model and of the optimizer. Nothing in head and steps depends on the number of
ranks, on time, or on how often the run was interrupted: steps that are computed again must give the same records.
"""

from __future__ import annotations

import enum
import hashlib
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dure.base.errors import ReceiptWrong
from dure.base.files import open_own, open_plain

FORMAT = 1
LANES = 8
_STEP = struct.Struct("<IIQdQQ8I8Q")
_ROOT = struct.Struct("<IIQ32s32s56x")
BODY = _STEP.size
HASH = 32
RECORD = BODY + HASH
NO_ROOT = bytes(32)


class Kind(enum.IntEnum):
    """Of a record."""

    STEP = 1
    ROOT = 2
    GAP = 3


@dataclass(frozen=True)
class StepRecord:
    """What is recorded of a step."""

    step: int
    samples: int
    loss: float
    mark: int
    content: int
    losses: tuple[int, ...]
    """By lane, 32 bits each."""
    gradients: tuple[int, ...]
    """By lane, 64 bits each."""

    def to_bytes(self) -> bytes:
        """The record's body."""
        return _STEP.pack(
            Kind.STEP,
            self.samples,
            self.step,
            self.loss,
            self.mark,
            self.content,
            *self.losses,
            *self.gradients,
        )

    @classmethod
    def from_bytes(cls, body: bytes) -> StepRecord:
        """What `to_bytes` gave."""
        _, samples, step, loss, mark, content, *lanes = _STEP.unpack(body)
        return cls(step, samples, loss, mark, content, tuple(lanes[:LANES]), tuple(lanes[LANES:]))

    def differs_from(self, other: StepRecord, shards: int) -> str:
        """What is not the same, in order of execution; "" when all is."""
        if (self.samples, self.mark) != (other.samples, other.mark):
            return "other samples"
        if self.content != other.content:
            return "other content of its samples"
        for lane in range(LANES):
            if self.losses[lane] != other.losses[lane]:
                return f"another loss in {lane_words(lane, shards)}"
            if self.gradients[lane] != other.gradients[lane]:
                return f"other gradients in {lane_words(lane, shards)}"
        return "" if self == other else "another mean loss"


@dataclass(frozen=True)
class RootRecord:
    """The state after so many steps."""

    step: int
    weights: bytes
    optimizer: bytes

    def to_bytes(self) -> bytes:
        """The record's body."""
        return _ROOT.pack(Kind.ROOT, 0, self.step, self.weights, self.optimizer)

    @classmethod
    def from_bytes(cls, body: bytes) -> RootRecord:
        """What `to_bytes` gave."""
        _, _, step, weights, optimizer = _ROOT.unpack(body)
        return cls(step, weights, optimizer)


@dataclass(frozen=True)
class GapRecord:
    """Steps that are not in the receipt: it was lost with a machine, or the run is older than receipts."""

    first: int
    end: int

    def to_bytes(self) -> bytes:
        """The record's body."""
        return _ROOT.pack(Kind.GAP, 0, self.end, self.first.to_bytes(32, "little"), NO_ROOT)

    @classmethod
    def from_bytes(cls, body: bytes) -> GapRecord:
        """What `to_bytes` gave."""
        _, _, end, first, _ = _ROOT.unpack(body)
        return cls(int.from_bytes(first, "little"), end)


Record = StepRecord | RootRecord | GapRecord
_KINDS: dict[int, type[StepRecord] | type[RootRecord] | type[GapRecord]] = {
    Kind.STEP: StepRecord,
    Kind.ROOT: RootRecord,
    Kind.GAP: GapRecord,
}


def parse(body: bytes) -> Record:
    """A record's body; ReceiptWrong when it is none."""
    kind = _KINDS.get(int.from_bytes(body[:4], "little"))
    if kind is None or len(body) != BODY:
        raise ReceiptWrong(f"the receipt has a record of a kind that is not known ({body[:4].hex()})")
    return kind.from_bytes(body)


def link(before: bytes, body: bytes) -> bytes:
    """The chain's next hash."""
    return hashlib.sha256(before + body).digest()


def lane_words(lane: int, shards: int) -> str:
    """Which shards a lane is of."""
    if shards <= LANES:
        return f"shard {lane}"
    return f"shards {lane * shards // LANES} to {(lane + 1) * shards // LANES - 1}"


def lanes_of(values: Sequence[bytes], nbytes: int) -> tuple[int, ...]:
    """Values by shard, 8 bytes each, as so many bytes per lane."""
    shards = len(values)
    runs: list[list[bytes]] = [[] for _ in range(LANES)]
    for shard, value in enumerate(values):
        lane = shard if shards <= LANES else shard * LANES // shards
        runs[lane].append(value)
    return tuple(
        int.from_bytes(hashlib.sha256(b"".join(run)).digest()[:nbytes], "little") if any(map(any, run)) else 0
        for run in runs
    )


def leaf(name: str, dtype: str, shape: Sequence[int], data: Iterable[bytes | memoryview]) -> bytes:
    """A tensor's hash: name, type, shape and bytes in the order of its elements."""
    digest = hashlib.sha256(b"\0")
    digest.update(f"{name} {dtype} {'x'.join(map(str, shape))}\n".encode(errors="surrogatepass"))
    for part in data:
        digest.update(part)
    return digest.digest()


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """Over leaves in order; the last of an odd row goes up as it is. NO_ROOT without leaves."""
    row = list(leaves)
    if not row:
        return NO_ROOT
    while len(row) > 1:
        pairs = [hashlib.sha256(b"\1" + row[at] + row[at + 1]).digest() for at in range(0, len(row) - 1, 2)]
        row = pairs + row[len(row) & ~1 :]
    return row[0]


class Chain:
    """The file of records, to be extended. One process writes it.

    From `go_on_at` on, records that are there already must be given again; the ones after them are appended.
    """

    def __init__(self, path: Path, head: bytes) -> None:
        self._descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
        size = os.fstat(self._descriptor).st_size
        self._count = size // RECORD
        if size % RECORD:  # a write that was cut short by a crash: it never was a record
            os.ftruncate(self._descriptor, self._count * RECORD)
        self._at = self._count
        self._head = hashlib.sha256(head).digest()
        self.last = self._read(self._count - 1)[BODY:] if self._count else self._head
        """The chain's hash, after the last record."""

    @property
    def count(self) -> int:
        """Records that are there."""
        return self._count

    def go_on_at(self, step: int) -> None:
        """The next step to be recorded; a gap where the records before it are not there."""
        low, high = 0, self._count
        while low < high:
            middle = (low + high) // 2
            found = parse(self._read(middle)[:BODY])
            at = found.end if isinstance(found, GapRecord) else found.step
            if at > step or (at == step and isinstance(found, StepRecord)):
                high = middle
            else:
                low = middle + 1
        self._at = low
        covered = self._covered(low)
        if covered < step and low == self._count:
            self.add(GapRecord(covered, step))

    def add(self, record: Record) -> Record | None:
        """Append a record; where there is one already, returns it if it is another one."""
        body = record.to_bytes()
        if self._at < self._count:
            found = self._read(self._at)[:BODY]
            self._at += 1
            return parse(found) if found != body else None
        chained = link(self.last, body)
        _write_at(self._descriptor, body + chained, self._count * RECORD)
        self.last = chained
        self._count += 1
        self._at = self._count
        return None

    def replace(self, record: Record) -> None:
        """Append a record in place of the one that `add` has returned, and of all after it."""
        self._at -= 1
        os.ftruncate(self._descriptor, self._at * RECORD)
        self._count = self._at
        self.last = self._read(self._count - 1)[BODY:] if self._count else self._head
        self.add(record)

    def next_recorded(self) -> Record | None:
        """The record that is there already in the next place."""
        return parse(self._read(self._at)[:BODY]) if self._at < self._count else None

    def last_recorded(self) -> Record | None:
        """The record before the next place."""
        return parse(self._read(self._at - 1)[:BODY]) if self._at else None

    def sync(self) -> None:
        """Make what was written survive a crash of the machine."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)

    def _covered(self, place: int) -> int:
        """The step after the last one that is recorded before a place."""
        for at in range(place - 1, -1, -1):
            found = parse(self._read(at)[:BODY])
            if isinstance(found, StepRecord):
                return found.step + 1
            if isinstance(found, GapRecord):
                return found.end
        return 0

    def _read(self, at: int) -> bytes:
        return os.pread(self._descriptor, RECORD, at * RECORD)


def _write_at(descriptor: int, data: bytes, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], at + done)


def records(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """(body, hash) of all records in a file, without looking at them."""
    with open(open_plain(path), "rb") as file:
        while block := file.read(RECORD * 4096):
            for at in range(0, len(block), RECORD):
                yield block[at : at + BODY], block[at + BODY : at + RECORD]
