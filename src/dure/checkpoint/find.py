"""Which checkpoints there are, and the newest that can be believed. No pointer says "latest": it could lie."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dure.base.errors import CheckpointError, StorageError, UsageError
from dure.base.say import printable
from dure.checkpoint.load import load, read_verified
from dure.checkpoint.manifest import (
    MANIFEST,
    PREFIX,
    Manifest,
    NewerFormat,
    check_files,
    read_manifest,
    set_aside,
    why_broken,
)
from dure.checkpoint.state import WholeState
from dure.comm.group import Group
from dure.comm.raise_on_all import raise_on_all
from dure.storage import Store, open_store

_NAME = re.compile(rf"{PREFIX}[A-Za-z0-9._-]{{1,200}}")
"""What looks like a checkpoint; others' files may be there too, with names that a terminal would obey."""


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
            "start anew with --fresh (nothing is deleted)"
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
            f"{found[0][0].trouble}); start anew with --fresh (nothing is deleted)"
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
    different = sorted(_differences(facts["recipe_words"], json.loads(json.dumps(recipe))))
    if different:
        raise UsageError(
            f"{where} holds a run of another recipe: {'; '.join(different[:5])}; going on would give other "
            "bits. Undo the change, give another --run-dir, or start anew with --fresh (nothing is deleted)"
        )


def _differences(before: Any, now: Any, key: str = "") -> Iterator[str]:
    """Where two recipes differ, in words."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in {*before, *now}:
            dotted = f"{key}.{name}" if key and key != "job" else name
            yield from _differences(before.get(name), now.get(name), dotted)
    elif before != now and key.startswith("code."):
        how = "new" if before is None else "gone" if now is None else "changed"
        yield f"{printable(key.removeprefix('code.'), 200)} is {how}"
    elif before != now:
        was, is_now = (printable(json.dumps(value), 200) for value in (before, now))
        yield f"{printable(key, 100)} was {was} and is {is_now}"
