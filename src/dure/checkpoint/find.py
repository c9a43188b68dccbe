"""Which checkpoints a run has, and the newest that can be believed. No pointer says "latest": it
could lie. Nothing that is read is believed before its hash is right.

The ranks of a node read each file once between them, into one shared memory that all then copy from.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dure.base.errors import CheckpointError, DureError, StorageError, UsageError
from dure.base.say import printable
from dure.checkpoint.manifest import (
    MANIFEST,
    PREFIX,
    File,
    Manifest,
    NewerFormat,
    check_files,
    read_manifest,
    set_aside,
    why_broken,
)
from dure.checkpoint.memory_tier import free_memory_bytes
from dure.checkpoint.state import WholeState
from dure.comm.group import Group
from dure.comm.raise_on_all import raise_on_all
from dure.comm.shm_segment import Offer, Segment, map_offer
from dure.storage import Store, open_store

_NAME = re.compile(rf"{PREFIX}[A-Za-z0-9._-]{{1,200}}")
"""What looks like a checkpoint; others' files may be there too, with names that a terminal would obey."""
CHUNK_BYTES = 16 << 20
_ARITHMETIC, _FIRST_SAMPLES = "arithmetic", "first_samples"
"""Parts of a recipe that older states do not have."""
_NAMED = 4
"""Operations that a message names."""


@dataclass(frozen=True)
class Entry:
    """A checkpoint, or what looks like one."""

    name: str
    manifest: Manifest | None
    trouble: str | None
    """Why it cannot be used, as far as was looked."""
    newer: bool = False
    """A newer dure wrote it: whole, but not for this one."""

    @property
    def order(self) -> tuple[str, int, str]:
        """Newest last: by the run's beginning, the step, the time."""
        if self.manifest is None:
            return ("", -1, self.name)
        facts = self.manifest.facts
        return (str(facts.get("line", "")), self.manifest.step, str(facts.get("saved_at", "")))


def entries(store: Store, *, deep: bool = False) -> list[Entry]:
    """All checkpoints, the newest first. `deep` reads every byte and compares hashes; else only sizes."""
    names = [name for name in store.names("") if _NAME.fullmatch(name)]
    if not store.renames:
        # There, a save that was cut short has its final name already; without a manifest it is nothing.
        names = [name for name in names if store.exists(f"{name}/{MANIFEST}")]
    found = [_entry(store, name, deep) for name in names]
    return sorted(found, key=lambda entry: entry.order, reverse=True)


def _entry(store: Store, name: str, deep: bool) -> Entry:
    manifest = None
    try:
        manifest = read_manifest(store, name)
        if why := why_broken(store, name):
            return Entry(name, manifest, why)
        check_files(store, name, manifest)
        if deep:
            for file in manifest.files:
                read_verified(store, name, manifest, file)
    except NewerFormat as error:
        return Entry(name, None, str(error), newer=True)
    except CheckpointError as error:
        return Entry(name, manifest, why_broken(store, name) or str(error))
    return Entry(name, manifest, None)


def newest_state(
    store: Store,
    everyone: Group,
    node: Group,
    accepts: Callable[[Manifest], None],
    tell: Callable[[str], None],
    alive: Callable[[], None] = lambda: None,
    also: Sequence[str] = (),
) -> WholeState | None:
    """The newest state that is whole; None when nothing was ever saved. A collective call.

    A damaged one is set aside with a message, and the one before is taken. `accepts` may raise for one that is
    whole but of another job. Rank 0 looks and decides; the others follow. `alive` is called while bytes are read.
    `also` are other places in which there may be some.
    """
    tried = 0
    candidates = _on_leader(everyone, lambda: _candidates(store, also, tell))
    for where, name in candidates:
        tried += 1
        whole, trouble = None, ""
        at = open_store(where) if where else store
        try:
            whole = _read(at, name, everyone, node, accepts, alive)
        except CheckpointError as error:
            trouble = str(error)
        troubles = [text for text in everyone.gather(trouble, "verifying a checkpoint") if text]
        if not troubles:
            if where and whole is not None:
                tell(f"goes on from {where}/{name}")
                return replace(whole, elsewhere=True)
            return whole
        if everyone.rank == 0:
            _set_aside(at, name, troubles[0], tell)
    if tried:
        raise CheckpointError(
            f"{store.location}: none of the {tried} newest checkpoints can be used, for the reasons above; "
            "start anew with --fresh or in another folder (nothing is deleted)"
        )
    return None


def _read(
    store: Store,
    name: str,
    everyone: Group,
    node: Group,
    accepts: Callable[[Manifest], None],
    alive: Callable[[], None],
) -> WholeState:
    """A checkpoint's bytes, on all ranks; what one of them finds wrong, all raise."""
    found: list[Manifest] = []

    def look() -> str:
        found.append(read_manifest(store, name))
        return ""

    raise_on_all(everyone, "reading a manifest", look)
    accepts(found[0])
    return load(store, name, found[0], node, alive)


def _candidates(store: Store, also: Sequence[str], tell: Callable[[str], None]) -> list[tuple[str, str]]:
    """(place, name) to try, newest first, with "" for the run's own place; those that are clearly damaged are told and
    left out."""
    there = [where for where in also if "://" in where or Path(where).is_dir()]
    places = [("", store), *((where, open_store(where)) for where in there)]
    found = [(entry, where, at) for where, at in places for entry in entries(at)]
    # Of two that are as new as each other, the run's own.
    found.sort(key=lambda each: (each[0].order, each[1] == ""), reverse=True)
    names = []
    for entry, where, at in found:
        if entry.newer:
            raise CheckpointError(f"{at.location}: {entry.name}: {entry.trouble}, or start anew with --fresh")
        if entry.trouble is None:
            names.append((where, entry.name))
        elif not why_broken(at, entry.name):
            _set_aside(at, entry.name, entry.trouble, tell)
    if found and not names:
        raise CheckpointError(
            f"{store.location}: none of its {len(found)} checkpoint(s) can be used ({found[0][0].name}: "
            f"{found[0][0].trouble}); start anew with --fresh or in another folder (nothing is deleted)"
        )
    return names


def _set_aside(store: Store, name: str, why: str, tell: Callable[[str], None]) -> None:
    tell(f"checkpoint {name} cannot be used: {why}; set aside, the one before is taken")
    try:
        set_aside(store, name, why)
    except StorageError as error:
        tell(f"checkpoint {name} could not be marked as broken: {error}")


def _on_leader(everyone: Group, look: Callable[[], Sequence[tuple[str, str]]]) -> list[tuple[str, str]]:
    """What rank 0 finds, on all ranks; its error too, so that nobody waits for it."""
    told = ""
    if everyone.rank == 0:
        try:
            told = json.dumps({"names": list(look())})
        except (CheckpointError, StorageError, UsageError) as error:
            told = json.dumps({"error": str(error), "storage": isinstance(error, StorageError)})
    found = json.loads(everyone.gather(told, "looking for checkpoints")[0])
    if "error" in found:
        raise (StorageError if found["storage"] else CheckpointError)(found["error"])
    return [(str(where), str(name)) for where, name in found["names"]]


def refuse_other_recipe(facts: Mapping[str, Any], recipe: dict[str, Any], where: str) -> None:
    """Refuse to go on with a state that other code, another job or another machine's arithmetic has begun; says what
    differs."""
    before, now = dict(facts["recipe_words"]), json.loads(json.dumps(recipe))
    if _FIRST_SAMPLES not in before:  # of a version that did not look
        now.pop(_FIRST_SAMPLES, None)
    arithmetic = [each.pop(_ARITHMETIC, None) for each in (before, now)]
    different = [*_other_arithmetic(*arithmetic), *sorted(_differences(before, now))]
    if different:
        raise UsageError(
            f"{where} holds a run of another recipe: {'; '.join(different[:5])}; going on would give other "
            "bits. Undo the change, or start anew with --fresh or in another folder (nothing is deleted)"
        )


def _other_arithmetic(before: dict[str, str] | None, now: dict[str, str] | None) -> Iterator[str]:
    """Which operations give other bits on this machine; nothing for a state of a version that did not measure it."""
    if not before or not now:
        return
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if names:
        more = ", …" if len(names) > _NAMED else ""
        yield (
            f"this machine computes other bits in {len(names)} of {len(now)} operations "
            f"({printable(', '.join(names[:_NAMED]), 200)}{more}): go on where it began, or begin with "
            'team.arithmetic = "portable" where several kinds of CPU are to give the same bits'
        )


def _differences(before: Any, now: Any, key: str = "") -> Iterator[str]:
    """Where two recipes differ, in words."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in {*before, *now}:
            dotted = f"{key}.{name}" if key and key != "job" else name
            yield from _differences(before.get(name), now.get(name), dotted)
    elif before != now and key == _FIRST_SAMPLES:
        yield "the data's first samples are changed"
    elif before != now and key.startswith("code."):
        how = "new" if before is None else "gone" if now is None else "changed"
        yield f"{printable(key.removeprefix('code.'), 200)} is {how}"
    elif before != now:
        was, is_now = (printable(json.dumps(value), 200) for value in (before, now))
        yield f"{printable(key, 100)} was {was} and is {is_now}"


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
