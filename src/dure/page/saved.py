"""A run's checkpoints as they lie on the disk: step, size, time, and whether manifest and sizes are right.

Nothing of a checkpoint is loaded: `dure checkpoints` reads every byte and compares hashes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from dure.base.files import read_at_most

_NAME = re.compile(r"step-[A-Za-z0-9._-]{1,200}")
_FILE = re.compile(r"part-[0-9]{1,6}-of-[0-9]{1,6}\.safetensors")
_LONGEST_MANIFEST = 8 << 20
_MOST = 200


def saved_checkpoints(run: Path, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Newest first; empty where they are in a bucket or there are none."""
    place = _place(run, job)
    if place is None:
        return []
    try:
        names = sorted(
            (entry.name for entry in os.scandir(place) if _NAME.fullmatch(entry.name) and entry.is_dir()),
            reverse=True,
        )
    except OSError:
        return []
    return [_entry(place / name) for name in names[:_MOST]]


def _place(run: Path, job: dict[str, Any]) -> Path | None:
    settings = job.get("checkpoint")
    folder = settings.get("folder") if isinstance(settings, dict) else None
    if not isinstance(folder, str) or "://" in folder or "\0" in folder:
        return None
    storage = job.get("storage")
    text = folder.replace("{run}", run.name).replace(
        "{storage}", storage if isinstance(storage, str) else "."
    )
    return run / text


def _entry(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"name": folder.name, "step": None, "bytes": None, "saved_at": None}
    try:
        content = read_at_most(folder / "manifest.json", _LONGEST_MANIFEST)
        told = json.loads(content)
        digest = told.pop("sha256")
        facts, files = told["facts"], told["files"]
        found |= {"step": int(facts["step"]), "saved_at": str(facts.get("saved_at", ""))[:40]}
        found["bytes"] = sum(int(file["bytes"]) for file in files)
        found["files"] = len(files)
    except FileNotFoundError:
        return {**found, "state": "unfinished"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {**found, "state": "damaged"}
    if (folder / "broken.json").exists():
        return {**found, "state": "damaged"}
    body = json.dumps(told, sort_keys=True, separators=(",", ":")).encode()
    right = hashlib.sha256(body).hexdigest() == digest and all(_has_size(folder, file) for file in files)
    return {**found, "state": "sizes" if right else "damaged"}


def _has_size(folder: Path, file: dict[str, Any]) -> bool:
    name = str(file.get("name"))
    if not _FILE.fullmatch(name):
        return False
    try:
        return os.stat(folder / name, follow_symlinks=False).st_size == file.get("bytes")
    except OSError:
        return False
