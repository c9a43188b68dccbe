"""Pure maths: the files' bytes cut into windows, which readers read in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from dure.storage.safetensors import TensorAt

STAGING_BYTES = 32 * 2**20
"""Room for windows on their way, on each node."""
_LEAST_WINDOW_BYTES = 512 * 1024
_MOST_WINDOW_BYTES = 4 * 2**20
READ_THROUGH_BYTES = 256 * 1024
"""Bytes between two wanted tensors that are read with them: cheaper than asking twice."""


@dataclass(frozen=True)
class Piece:
    """A run of one tensor's bytes within a window."""

    tensor: int
    """Its position among the tensors that were cut."""
    start: int
    """Of the tensor's bytes, the first; a multiple of its element's size."""
    at: int
    """Where in the window."""
    nbytes: int


@dataclass(frozen=True)
class Window:
    """A run of one file's bytes."""

    file: str
    start: int
    nbytes: int
    pieces: tuple[Piece, ...]


def cut(tensors: Sequence[TensorAt], window_bytes: int) -> tuple[Window, ...]:
    """The windows that bring all of these tensors, in the order of the files' bytes. No element is cut in two."""
    order = sorted(
        (position for position, tensor in enumerate(tensors) if tensor.nbytes),
        key=lambda position: (tensors[position].file, tensors[position].start),
    )
    windows: list[Window] = []
    for file, positions in groupby(order, key=lambda position: tensors[position].file):
        for near in _near_each_other(tensors, list(positions)):
            windows += _windows_of(file, tensors, near, window_bytes)
    return tuple(windows)


def window_bytes_for(readers: int, nbytes: int) -> int:
    """The size of a window: of a small file every reader gets two, and of a large one there is room for two of each
    reader's at a time, one that is read and one that is copied."""
    even = max(min(STAGING_BYTES, nbytes) // (2 * readers), 1)
    rounded = -(-even // _LEAST_WINDOW_BYTES) * _LEAST_WINDOW_BYTES
    return min(rounded, _MOST_WINDOW_BYTES)


def _near_each_other(tensors: Sequence[TensorAt], positions: list[int]) -> Iterator[list[int]]:
    """Runs of tensors without a large gap between them."""
    near: list[int] = []
    stop = 0
    for position in positions:
        tensor = tensors[position]
        if near and tensor.start - stop > READ_THROUGH_BYTES:
            yield near
            near = []
        near.append(position)
        stop = max(stop, tensor.start + tensor.nbytes)
    yield near


def _windows_of(
    file: str, tensors: Sequence[TensorAt], positions: list[int], window_bytes: int
) -> Iterator[Window]:
    start = tensors[positions[0]].start
    last = max(tensors[position].start + tensors[position].nbytes for position in positions)
    while start < last:
        stop = min(start + window_bytes, last)
        here = [p for p in positions if tensors[p].start < stop]
        for position in here:
            tensor = tensors[position]
            if stop < tensor.start + tensor.nbytes:
                stop -= (stop - tensor.start) % tensor.dtype.itemsize
        pieces = []
        for position in here:
            tensor = tensors[position]
            first, end = max(tensor.start, start), min(tensor.start + tensor.nbytes, stop)
            if first < end:
                pieces.append(Piece(position, first - tensor.start, first - start, end - first))
        yield Window(file, start, stop - start, tuple(pieces))
        positions = [p for p in positions if tensors[p].start + tensors[p].nbytes > stop]
        start = stop
