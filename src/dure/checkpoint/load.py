"""Read a checkpoint and believe nothing before its hash is right.

The ranks of a node read each file once between them, into one shared memory that all then copy from.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Callable, Iterator

import torch

from dure.base.errors import CheckpointError, DureError, StorageError
from dure.checkpoint.manifest import File, Manifest, check_files
from dure.checkpoint.memory import free_memory_bytes
from dure.checkpoint.state import WholeState
from dure.comm.group import Group
from dure.comm.shm_segment import Offer, Segment, map_offer
from dure.storage import Store

CHUNK_BYTES = 16 << 20


def load(
    store: Store, path: str, manifest: Manifest, group: Group, alive: Callable[[], None] = lambda: None
) -> WholeState:
    """All bytes of the checkpoint at `path`, verified. A collective call of a node's ranks.

    `alive` is called while it reads: a large checkpoint on slow storage is not a hang.

    CheckpointError, on all ranks, when it is damaged; StorageError when the storage does not answer.
    """
    own = None
    trouble = ""
    if group.rank == 0:
        try:
            check_files(
                store, path, manifest
            )  # before memory is asked for: they are as long as that is large
            own = _memory_for(store, path, manifest)
        except (CheckpointError, StorageError) as error:
            trouble = json.dumps([type(error).__name__, str(error)])
    offer = json.dumps([trouble, own.offer().as_list() if own is not None else []])
    trouble, offered = json.loads(group.gather(offer, "sharing memory for a checkpoint")[0])
    _raise_first([json.loads(trouble)] if trouble else [])
    try:
        memory: mmap.mmap = own.bytes if own is not None else map_offer(Offer(*offered))
        try:
            for file in manifest.files[group.rank :: group.size]:
                read_verified(store, path, manifest, file, memoryview(memory), alive)
        except (CheckpointError, StorageError) as error:
            trouble = json.dumps([type(error).__name__, str(error)])
        found = [json.loads(text) for text in group.gather(trouble, "verifying a checkpoint") if text]
    finally:
        if own is not None:
            own.close()
    _raise_first(found)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return WholeState(manifest.facts, manifest.table, whole)


def _memory_for(store: Store, path: str, manifest: Manifest) -> Segment:
    needed, free = manifest.table.nbytes, free_memory_bytes()
    if needed > free:  # that is no damage
        raise StorageError(
            f"{store.location}: {path} needs {needed / 2**20:,.0f} MiB of memory, and only {free / 2**20:,.0f} MiB are "
            "free; free some, or use a larger machine"
        )
    return Segment(needed)


def _raise_first(found: list[list[str]]) -> None:
    """The storage's own trouble counts more than what looks like damage because of it."""
    kinds: dict[str, type[DureError]] = {"StorageError": StorageError, "CheckpointError": CheckpointError}
    for name, kind in kinds.items():
        for named, words in found:
            if named == name:
                raise kind(words)


def read_verified(
    store: Store,
    path: str,
    manifest: Manifest,
    file: File,
    memory: memoryview | None = None,
    alive: Callable[[], None] = lambda: None,
) -> None:
    """Read a file to its end, put its pieces to their places, and compare its hash."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(CHUNK_BYTES, file.nbytes)))
    spans = list(_places(manifest, file)) if memory is not None else []
    for start in range(0, file.nbytes, CHUNK_BYTES):
        chunk = buffer[: min(CHUNK_BYTES, file.nbytes - start)]
        store.read_into(f"{path}/{file.name}", start, chunk)
        digest.update(chunk)
        alive()
        end = start + len(chunk)
        for at, nbytes, into in spans:
            low, high = max(at, start), min(at + nbytes, end)
            if low < high and memory is not None:
                memory[into + low - at : into + high - at] = chunk[low - start : high - start]
    if digest.hexdigest() != file.sha256:
        raise CheckpointError(f"its {file.name} is damaged: it does not have the hash that the manifest says")


def _places(manifest: Manifest, file: File) -> Iterator[tuple[int, int, int]]:
    """Of each piece: where it is in the file, its bytes, where it belongs in the whole state's memory."""
    at = file.data
    for position, start, stop in file.pieces:
        span = manifest.table.spans[position]
        size = span.dtype.itemsize
        yield at, (stop - start) * size, span.start + start * size
        at += (stop - start) * size
