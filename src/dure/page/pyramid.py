"""One rank's steps, quick at every zoom: raw, and min, max, first, last and mean of every 64 and 4,096 of them.

Steps come in the order of the rank's events and are only appended. Each 65,536 become a chunk file that never changes;
the rest is in memory. A run that was resumed repeats steps: `Stretch`es say which step is where, the last one told
counts.

    rank-0.00003.steps    a line of JSON, then float32: the columns that vary, then the bins of 64
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dure.base.files import open_plain, write_whole
from dure.page.cache import Cache
from dure.page.columns import AT, COLUMNS, Table

CHUNK = 1 << 16
"""Steps in a chunk file."""
BIN = 64
COARSE = BIN * BIN
STATS = ("min", "max", "first", "last", "mean")
_FORMAT = "dure-page-steps-1"
_CACHED_BYTES = 48 << 20
_LONGEST_HEADER = 1 << 16
_MOST_STRETCHES = 1 << 14
_BINS_AT_ONCE = 20_000
"""A window is made of at most about so many bins, or steps, of a rank."""
Bins = np.ndarray[Any, np.dtype[np.float32]]
"""[len(STATS), columns, bins]"""


@dataclass
class Stretch:
    """Steps that follow each other, at this place among the rank's."""

    first: int
    """The step."""
    place: int
    length: int


class Pyramid:
    """The steps of one rank."""

    def __init__(self, cache: Cache, rank: int) -> None:
        self._cache_folder, self._rank = cache, rank
        self.chunks = 0
        """Complete ones; their files are there."""
        self._tail = np.full((len(COLUMNS), CHUNK), np.nan, np.float32)
        self._tail_bins = np.full((len(STATS), len(COLUMNS), CHUNK // BIN), np.nan, np.float32)
        self._filled = 0
        self._coarse: list[Bins] = []
        """Of each chunk, its 16 bins of 4,096."""
        self._cache: OrderedDict[tuple[int, str], Any] = OrderedDict()
        self._cached_bytes = 0
        self.stretches: list[Stretch] = []

    def __len__(self) -> int:
        return self.chunks * CHUNK + self._filled

    @property
    def last_step(self) -> int:
        """-1: none."""
        return max((one.first + one.length - 1 for one in self.stretches), default=-1)

    def append(self, first: int, table: Table) -> Iterator[int]:
        """Add steps that follow each other; yields the number of each chunk that became complete, when its file is
        there."""
        self._stretch(first, table.shape[1])
        done = 0
        while done < table.shape[1]:
            room = min(CHUNK - self._filled, table.shape[1] - done)
            self._tail[:, self._filled : self._filled + room] = table[:, done : done + room]
            before = self._filled // BIN
            self._filled += room
            done += room
            upto = self._filled // BIN
            if upto > before:
                rows = self._tail[:, before * BIN : upto * BIN]
                self._tail_bins[:, :, before:upto] = binned(rows, BIN)
            if self._filled == CHUNK:
                self._write_chunk()
                yield self.chunks - 1

    def restore(self, chunks: int, stretches: Sequence[Stretch]) -> None:
        """Go on from chunk files that are there; ValueError when they are not ours."""
        for chunk in range(chunks):
            self._coarse.append(_coarse(self._bins(chunk)))
        self.chunks, self.stretches = chunks, list(stretches)

    def window(self, first: int, end: int, bins: int, columns: Sequence[str]) -> Bins:
        """Steps from `first` to before `end` in at most `bins` bins of equal width; NaN where there are none. Raw
        steps, one per bin, when there is room for all."""
        width = width_of(first, end, bins)
        count = -(-(end - first) // width)
        out = np.full((len(STATS), len(columns), count), np.nan, np.float32)
        weight = np.zeros((len(columns), count), np.float64)
        places = [AT[name] for name in columns]
        for step, place, length in self._visible(first, end):
            for at, size, stats in self._pieces(place, place + length, (end - first)):
                starts = (step + (at - place) - first) + size * np.arange(stats.shape[2])
                _merge(out, weight, (starts // width).astype(np.int64), stats[:, places], size)
        return out

    def raw(self, first: int, end: int) -> Iterator[tuple[int, Table]]:
        """Stretches of raw steps (first step, columns) from `first` to before `end`, in order, a chunk at a time."""
        for step, place, length in sorted(self._visible(first, end)):
            done = 0
            while done < length:
                chunk, offset = divmod(place + done, CHUNK)
                size = min(CHUNK - offset, length - done)
                yield step + done, self._rows(chunk, offset, offset + size)
                done += size

    def _stretch(self, first: int, length: int) -> None:
        last = self.stretches[-1] if self.stretches else None
        if last is not None and last.first + last.length == first and last.place + last.length == len(self):
            last.length += length
            return
        if len(self.stretches) >= _MOST_STRETCHES:
            raise ValueError("steps in no order")
        self.stretches.append(Stretch(first, len(self), length))

    def _visible(self, first: int, end: int) -> list[tuple[int, int, int]]:
        """(step, place, length) of what counts between two steps: the last told of each."""
        found, open_parts = [], [(first, end)]
        for one in reversed(self.stretches):
            left = []
            for begin, stop in open_parts:
                low, high = max(begin, one.first), min(stop, one.first + one.length)
                if low >= high:
                    left.append((begin, stop))
                    continue
                found.append((low, one.place + low - one.first, high - low))
                left += [(begin, low)] if begin < low else []
                left += [(high, stop)] if high < stop else []
            open_parts = left
            if not open_parts:
                break
        return found

    def _pieces(self, place: int, stop: int, span: int) -> Iterator[tuple[int, int, Bins]]:
        """(place, steps per bin, bins) that make up these places: coarse where that is fine enough, raw at the ends."""
        size = 1 if span <= _BINS_AT_ONCE else BIN if span <= _BINS_AT_ONCE * BIN else COARSE
        while place < stop:
            chunk, offset = divmod(place, CHUNK)
            upto = min(stop - chunk * CHUNK, CHUNK)
            whole = min(upto, self._filled) // size * size if chunk == self.chunks else upto // size * size
            if size > 1 and offset % size == 0 and whole > offset:
                yield place, size, self._binned(chunk, size)[:, :, offset // size : whole // size]
                place += whole - offset
            else:
                edge = min(upto, -(-(offset + 1) // size) * size) if size > 1 else upto
                rows = self._rows(chunk, offset, edge)
                yield place, 1, np.broadcast_to(rows, (len(STATS), *rows.shape))
                place += edge - offset

    def _rows(self, chunk: int, begin: int, stop: int) -> Table:
        if chunk == self.chunks:
            return self._tail[:, begin:stop]
        return self._raw(chunk)[:, begin:stop]

    def _binned(self, chunk: int, size: int) -> Bins:
        if size == COARSE:
            return _coarse(self._tail_bins) if chunk == self.chunks else self._coarse[chunk]
        return self._tail_bins if chunk == self.chunks else self._bins(chunk)

    def _path(self, chunk: int) -> Path:
        return self._cache_folder.path / f"rank-{self._rank}.{chunk:05d}.steps"

    def _write_chunk(self) -> None:
        constant = {
            name: float(row[0])
            for name, row in zip(COLUMNS, self._tail, strict=True)
            if (row == row[0]).all() or np.isnan(row).all()
        }
        header = {
            "format": _FORMAT,
            "columns": [name for name in COLUMNS if name not in constant],
            "constant": {name: None if np.isnan(value) else repr(value) for name, value in constant.items()},
        }
        rows = np.ascontiguousarray(self._tail[[AT[name] for name in COLUMNS if name not in constant]])
        head = json.dumps(header).encode() + b"\n"
        self._cache_folder.make()
        write_whole(self._path(self.chunks), [head, rows.tobytes(), self._tail_bins.tobytes()])
        self._coarse.append(_coarse(self._tail_bins))
        self.chunks += 1
        self._filled = 0
        self._tail.fill(np.nan)
        self._tail_bins.fill(np.nan)

    def _raw(self, chunk: int) -> Table:
        return np.asarray(self._cached(chunk, "raw"))

    def _bins(self, chunk: int) -> Bins:
        return np.asarray(self._cached(chunk, "bins"))

    def _cached(self, chunk: int, what: str) -> Any:
        key = (chunk, what)
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        found = self._read(chunk, what)
        self._cache[key] = found
        self._cached_bytes += found.nbytes
        while self._cached_bytes > _CACHED_BYTES // 8 and len(self._cache) > 1:
            _, old = self._cache.popitem(last=False)
            self._cached_bytes -= old.nbytes
        return found

    def _read(self, chunk: int, what: str) -> Any:
        """Of a chunk file; ValueError for one that is not ours, OSError when it is gone."""
        with open(open_plain(self._path(chunk)), "rb") as file:
            header = json.loads(file.readline(_LONGEST_HEADER))
            if not isinstance(header, dict) or header.get("format") != _FORMAT:
                raise ValueError("not a chunk of this version")
            varying = [name for name in header["columns"] if name in AT]
            if what == "bins":
                file.seek(len(varying) * CHUNK * 4, 1)
                shape: tuple[int, ...] = (len(STATS), len(COLUMNS), CHUNK // BIN)
                return _floats(file.read(4 * int(np.prod(shape))), shape)
            rows = _floats(file.read(len(varying) * CHUNK * 4), (len(varying), CHUNK))
        table = np.full((len(COLUMNS), CHUNK), np.nan, np.float32)
        table[[AT[name] for name in varying]] = rows
        for name, value in header["constant"].items():
            if name in AT and value is not None:
                table[AT[name]] = float(value)
        return table


def width_of(first: int, end: int, bins: int) -> int:
    """Steps in one bin of a window."""
    return max(1, -(-(end - first) // max(1, bins)))


def binned(rows: Table, size: int) -> Bins:
    """[columns, steps] in bins of `size`; NaN is left out of min, max and mean."""
    cut = rows.reshape(rows.shape[0], -1, size)
    known = ~np.isnan(cut)
    counts = known.sum(axis=2)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        mean = np.where(known, cut, 0).sum(axis=2, dtype=np.float64) / counts
    return np.stack(
        [
            np.fmin.reduce(cut, axis=2),
            np.fmax.reduce(cut, axis=2),
            cut[:, :, 0],
            cut[:, :, -1],
            mean.astype(np.float32),
        ]
    )


def _coarse(bins: Bins) -> Bins:
    """Bins of bins, BIN to one; those that are not full at the end are as they are."""
    cut = bins.reshape(bins.shape[0], bins.shape[1], -1, BIN)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        known = ~np.isnan(cut[4])
        mean = np.where(known, cut[4], 0).sum(axis=2, dtype=np.float64) / known.sum(axis=2)
    return np.stack(
        [
            np.fmin.reduce(cut[0], axis=2),
            np.fmax.reduce(cut[1], axis=2),
            cut[2][:, :, 0],
            cut[3][:, :, -1],
            mean.astype(np.float32),
        ]
    )


def _merge(out: Bins, weight: Any, index: Any, stats: Bins, size: int) -> None:
    """Put finer bins, in order, into those of the window that they fall into."""
    if index.size == 0:
        return
    starts = np.flatnonzero(np.r_[True, index[1:] != index[:-1]])
    at = index[starts]
    ends = np.r_[starts[1:], index.size] - 1
    out[0][:, at] = np.fmin(out[0][:, at], np.fmin.reduceat(stats[0], starts, axis=1))
    out[1][:, at] = np.fmax(out[1][:, at], np.fmax.reduceat(stats[1], starts, axis=1))
    first = out[2][:, at]
    out[2][:, at] = np.where(np.isnan(first), stats[2][:, starts], first)
    last = stats[3][:, ends]
    out[3][:, at] = np.where(np.isnan(last), out[3][:, at], last)
    known = ~np.isnan(stats[4])
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        sums = np.add.reduceat(np.where(known, stats[4], 0).astype(np.float64), starts, axis=1) * size
        counts = np.add.reduceat(known.astype(np.float64), starts, axis=1) * size
        before = weight[:, at]
        held = np.where(before > 0, out[4][:, at], 0) * before
        total = before + counts
        out[4][:, at] = np.where(total > 0, (held + sums) / total, np.nan)
    weight[:, at] = total


def _floats(content: bytes, shape: tuple[int, ...]) -> Any:
    found = np.frombuffer(content, np.float32)
    if found.size != int(np.prod(shape)):
        raise ValueError("a chunk that is cut short")
    return found.reshape(shape)
