"""One rank's share as a safetensors file: copied once on the step path, written from that copy."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import mmap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch

from dure.checkpoint.manifest import File
from dure.checkpoint.state import Piece, State
from dure.checkpoint.table import Table, TensorSpan
from dure.checkpoint.witness import fingerprint_of, is_not_finite
from dure.device.copying import copy_into
from dure.device.fingerprint import raw_bytes
from dure.storage import Store
from dure.storage.safetensors import DTYPES

CHUNK_BYTES = 8 << 20
_NOTHING = torch.empty(0)
_CODES = {dtype: code for code, dtype in DTYPES.items()}


class Snapshot:
    """A copy of a rank's share, in memory that the next copy uses again."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pieces: tuple[Piece, ...] = ()
        self._places: list[int] = []
        """Where each of them begins in the memory."""
        self._alike: list[int] = []
        """Positions of those that other ranks hold too, by their offset in the state."""
        self._table = Table(())

    def take(self, state: State) -> None:
        """Copy the share: the only thing that a step has to wait for."""
        # Wide types first, so that every element is aligned in the memory and in the file without a gap.
        ordered = sorted(state.pieces, key=lambda piece: (-piece.span.dtype.itemsize, piece.offset))
        self.buffer(state)
        ends = itertools.accumulate(piece.nbytes for piece in ordered)
        spans = [end - piece.nbytes for piece, end in zip(ordered, ends, strict=True)]
        copy_into(self._memory, spans, [piece.values for piece in ordered])
        # Without their values: those are the live replica's.
        self._pieces = tuple(replace(piece, values=_NOTHING) for piece in ordered)
        self._places, self._table = spans, state.table
        alike = {id(piece) for piece in state.alike}
        chosen = [at for at, piece in enumerate(ordered) if id(piece) in alike]
        self._alike = sorted(chosen, key=lambda at: ordered[at].offset)

    def shared(self) -> str:
        """The fingerprint of those pieces that other ranks hold too."""
        data = raw_bytes(self._memory)
        return fingerprint_of(
            (piece.offset, data[start : start + piece.nbytes])
            for piece, start in ((self._pieces[at], self._places[at]) for at in self._alike)
        )

    def not_finite(self, matters: Callable[[str], bool]) -> str:
        """The first tensor with a number that is not finite, among those of which it matters; "" when there is none."""
        for piece, start in zip(self._pieces, self._places, strict=True):
            values = self._memory[start : start + piece.nbytes].view(piece.span.dtype)
            if is_not_finite(values) and matters(piece.span.name):
                return piece.span.name
        return ""

    def buffer(self, state: State) -> torch.Tensor:
        """The memory that such a share is copied to."""
        nbytes = sum(piece.nbytes for piece in state.pieces)
        if self._memory.numel() != nbytes:
            self._memory = _staging(nbytes)
        return self._memory

    def write(self, store: Store, folder: str, name: str) -> File:
        """Write the copy under `folder`/`name`; returns what the manifest has to say of it."""
        head = header_of((piece.span, piece.start, piece.stop) for piece in self._pieces)
        digest = hashlib.sha256()
        data = raw_bytes(self._memory)

        def parts() -> Iterator[bytes | memoryview]:
            digest.update(head)
            yield head
            for start in range(0, len(data), CHUNK_BYTES):
                chunk = data[start : start + CHUNK_BYTES]
                digest.update(chunk)
                yield chunk

        store.write_whole(f"{folder}/{name}", parts())
        position = {span.name: at for at, span in enumerate(self._table.spans)}
        pieces = tuple((position[p.span.name], p.start, p.stop) for p in self._pieces)
        return File(name, len(head) + len(data), digest.hexdigest(), len(head), pieces)


def _staging(nbytes: int) -> torch.Tensor:
    """Memory of large pages, where the kernel has some: it is there sooner, and copied to faster."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def header_of(pieces: Iterable[tuple[TensorSpan, int, int]]) -> bytes:
    """The first bytes of a file of these runs of tensors' elements, whose bytes follow each other without a gap.

    A whole tensor has its own name and shape; a run of one says which.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt", "written_by": "dure"}}
    at = 0
    for span, start, stop in pieces:
        whole = stop - start == span.numel
        nbytes = (stop - start) * span.dtype.itemsize
        key = span.name if whole else f"{span.name}[{start}:{stop}]"
        shape = list(span.shape) if whole else [stop - start]
        code = _CODES.get(span.dtype)
        if code is None:  # a type that the format has no word for: its plain bytes
            code, shape = "U8", [nbytes]
        entries[key] = {"dtype": code, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Up to a page: what follows can go to the disk straight from a memory of pages.
    text += b" " * (-(len(text) + 8) % mmap.PAGESIZE)
    return len(text).to_bytes(8, "little") + text
