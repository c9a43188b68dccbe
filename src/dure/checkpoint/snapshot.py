"""One rank's share as a safetensors file, off the step path: copied once into memory that is there before it is needed,
then written from that copy by a thread of its own."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import json
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch

from dure.checkpoint.manifest import File
from dure.checkpoint.state import Piece, State, Table, TensorSpan, fingerprint_of, is_not_finite
from dure.device.copying import POPULATE_WRITE, copy_into
from dure.device.fingerprint import raw_bytes
from dure.storage import Store
from dure.storage.safetensors import DTYPES

CHUNK_BYTES = 8 << 20
_NOTHING = torch.empty(0)
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_AT_ONCE_BYTES = 256 << 20
_NICE = 10
_LONGEST_PAUSE_SECONDS = 0.5


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


def make_present(memories: Iterable[torch.Tensor]) -> None:
    """Have the kernel provide the pages of these flat memories. What stands in them stays.

    An older kernel refuses; then the first write pays, as ever. The call does not hold the GIL.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for memory in memories:
        end = memory.data_ptr() + memory.numel() * memory.element_size()
        at = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        while at < end:
            if madvise(at, min(_AT_ONCE_BYTES, end - at), POPULATE_WRITE) != 0:
                return
            at += _AT_ONCE_BYTES


class Background:
    """A thread that is there for as long as the process, so that beginning something costs one queue put."""

    def __init__(self, name: str, *, gives_way: bool = False) -> None:
        """`gives_way`: at a lower priority than training. For work outside of Python only: a thread that waits for a
        core while it holds the GIL would keep training waiting too."""
        self._name = name
        self._gives_way = gives_way
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], float]] = queue.SimpleQueue()
        self._free = threading.Event()
        self._free.set()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self.cpu_seconds = 0.0
        """That the last call took."""

    @property
    def busy(self) -> bool:
        """Whether something is still being done."""
        return not self._free.is_set()

    def begin(self, call: Callable[[], None], pause_seconds: float = 0.0) -> None:
        """Have it done; nothing else may be under way.

        After a copy, a pause as long: the other ranks of the node may still be copying, and all wait for the last.
        """
        assert not self.busy, "one thing at a time"
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._free.clear()
        self._calls.put((call, min(pause_seconds, _LONGEST_PAUSE_SECONDS)))

    def wait(self, seconds: float) -> bool:
        """Wait so long for the end of what was begun; raises what that raised."""
        if not self._free.wait(seconds):
            return False
        error, self._error = self._error, None
        if error is not None:
            raise error
        return True

    def _run(self) -> None:
        if self._gives_way:
            with contextlib.suppress(OSError):  # not allowed here
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while True:
            call, pause_seconds = self._calls.get()
            time.sleep(pause_seconds)
            began = time.thread_time()
            try:
                call()
            except Exception as error:
                self._error = error
            self.cpu_seconds = time.thread_time() - began
            del call  # what it holds is the next step's
            self._free.set()
