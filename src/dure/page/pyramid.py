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
from typing import Any, BinaryIO

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
_CACHED_CHUNKS = 20
"""Of each rank, a quarter of a megabyte each."""
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
        self._cache: OrderedDict[int, Bins] = OrderedDict()
        """By chunk, its bins of 64."""
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

    def window(
        self, first: int, end: int, bins: int, columns: Sequence[str], stats: Sequence[str] = STATS
    ) -> Bins:
        """Steps from `first` to before `end` in at most `bins` bins of equal width (`grid_of`); NaN where there are
        none. Raw steps, one per bin, when there is room for all. In a run that was resumed, bins of 64 may lie over an
        edge: they are told in the bin that they begin in."""
        span = end - first
        first, width, count = grid_of(first, end, bins)
        out = np.full((len(stats), len(columns), count), np.nan, np.float32)
        weight = np.zeros((len(columns), count), np.float64)
        places = [AT[name] for name in columns]
        which = [STATS.index(name) for name in stats]
        for step, place, length in self._visible(first, end):
            for at, size, found in self._pieces(place, place + length, span, places, which):
                starts = (step + (at - place) - first) + size * np.arange(found.shape[2])
                _merge(out, weight, (starts // width).astype(np.int64), found, size, stats)
        return out

    def raw(self, first: int, end: int) -> Iterator[tuple[int, Table]]:
        """Stretches of raw steps (first step, columns) from `first` to before `end`, in order, a chunk at a time."""
        for step, place, length in sorted(self._visible(first, end)):
            done = 0
            while done < length:
                chunk, offset = divmod(place + done, CHUNK)
                size = min(CHUNK - offset, length - done)
                yield step + done, self._rows(chunk, offset, offset + size, range(len(COLUMNS)))
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

    def _pieces(
        self, place: int, stop: int, span: int, places: Sequence[int], which: Sequence[int]
    ) -> Iterator[tuple[int, int, Bins]]:
        """(place, steps per bin, bins) that make up these places: coarse where that is fine enough, raw at the ends."""
        size = _finest(span)
        while place < stop:
            chunk, offset = divmod(place, CHUNK)
            upto = min(stop - chunk * CHUNK, CHUNK)
            whole = min(upto, self._filled) // size * size if chunk == self.chunks else upto // size * size
            if size > 1 and offset % size == 0 and whole > offset:
                cut = slice(offset // size, whole // size)
                yield place, size, self._binned(chunk, size)[which][:, places, cut]
                place += whole - offset
            else:
                edge = min(upto, -(-(offset + 1) // size) * size) if size > 1 else upto
                rows = self._rows(chunk, offset, edge, places)
                yield place, 1, np.broadcast_to(rows, (len(which), *rows.shape))
                place += edge - offset

    def _rows(self, chunk: int, begin: int, stop: int, places: Sequence[int]) -> Table:
        """Raw steps of a chunk, of these columns."""
        if chunk == self.chunks:
            return self._tail[places, begin:stop]
        found = np.full((len(places), stop - begin), np.nan, np.float32)
        with open(open_plain(self._path(chunk)), "rb") as file:
            header, start = _header(file)
            varying, constant = header["columns"], header["constant"]
            for at, place in enumerate(places):
                name = COLUMNS[place]
                if name in varying:
                    file.seek(start + 4 * (varying.index(name) * CHUNK + begin))
                    found[at] = _floats(file.read(4 * (stop - begin)), (stop - begin,))
                elif constant.get(name) is not None:
                    found[at] = float(constant[name])
        return found

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

    def _bins(self, chunk: int) -> Bins:
        if chunk in self._cache:
            self._cache.move_to_end(chunk)
            return self._cache[chunk]
        with open(open_plain(self._path(chunk)), "rb") as file:
            header, start = _header(file)
            file.seek(start + 4 * len(header["columns"]) * CHUNK)
            shape = (len(STATS), len(COLUMNS), CHUNK // BIN)
            found: Bins = _floats(file.read(4 * int(np.prod(shape))), shape)
        self._cache[chunk] = found
        while len(self._cache) > _CACHED_CHUNKS:
            self._cache.popitem(last=False)
        return found


def _header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """A chunk file's first line, and where it ends; ValueError for one that is not ours."""
    line = file.readline(_LONGEST_HEADER)
    header = json.loads(line)
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise ValueError("not a chunk of this version")
    varying, constant = header.get("columns"), header.get("constant")
    if not isinstance(varying, list) or not set(varying) <= set(COLUMNS) or not isinstance(constant, dict):
        raise ValueError("not a chunk of this version")
    return header, len(line)


def grid_of(first: int, end: int, bins: int) -> tuple[int, int, int]:
    """The first step, the steps per bin and the number of bins of a window: wide ones are laid on whole bins of 64 or
    4,096, so that what they say is exact."""
    size = _finest(end - first)
    first = first // size * size
    width = -(-(end - first) // max(1, bins))
    width = max(1, -(-width // size)) * size
    return first, width, -(-(end - first) // width)


def _finest(span: int) -> int:
    """Steps per bin of what a window of so many steps is made of."""
    return 1 if span <= _BINS_AT_ONCE else BIN if span <= _BINS_AT_ONCE * BIN else COARSE


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


def _merge(out: Bins, weight: Any, index: Any, found: Bins, size: int, stats: Sequence[str]) -> None:
    """Put finer bins, in order, into those of the window that they fall into."""
    if index.size == 0:
        return
    starts = np.flatnonzero(np.r_[True, index[1:] != index[:-1]])
    at = index[starts]
    ends = np.r_[starts[1:], index.size] - 1
    for own, fine, name in zip(out, found, stats, strict=True):
        before = own[:, at]
        if name == "min":
            own[:, at] = np.fmin(before, np.fmin.reduceat(fine, starts, axis=1))
        elif name == "max":
            own[:, at] = np.fmax(before, np.fmax.reduceat(fine, starts, axis=1))
        elif name == "first":
            own[:, at] = np.where(np.isnan(before), fine[:, starts], before)
        elif name == "last":
            own[:, at] = np.where(np.isnan(fine[:, ends]), before, fine[:, ends])
        else:
            _merge_mean(own, weight, at, fine, starts, size)


def _merge_mean(own: Any, weight: Any, at: Any, fine: Any, starts: Any, size: int) -> None:
    known = ~np.isnan(fine)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        sums = np.add.reduceat(np.where(known, fine, 0), starts, axis=1, dtype=np.float64) * size
        counts = np.add.reduceat(known, starts, axis=1, dtype=np.float64) * size
        before = weight[:, at]
        held = np.where(before > 0, own[:, at], 0) * before
        total = before + counts
        own[:, at] = np.where(total > 0, (held + sums) / total, np.nan)
    weight[:, at] = total


def _floats(content: bytes, shape: tuple[int, ...]) -> Any:
    found = np.frombuffer(content, np.float32)
    if found.size != int(np.prod(shape)):
        raise ValueError("a chunk that is cut short")
    return found.reshape(shape)
