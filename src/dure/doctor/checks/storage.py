"""The shared storage as one node sees it."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from pathlib import Path

from dure.base.files import write_whole
from dure.doctor.finding import Finding, bad, good, note
from dure.doctor.plan import JobNeeds

_REFUSALS = (errno.EROFS, errno.EACCES, errno.EPERM)
MARK = ".dure-doctor-"
"""How the names of all files and folders begin that the doctor makes."""
_LEAST_TEMPORARY = 64 << 20


def there(plan: JobNeeds, node: str) -> Finding:
    """Whether the storage, and what the job reads of it, is on this node."""
    assert plan.storage is not None
    if not os.path.isdir(plan.storage):
        return bad("storage", node, "storage.gone", path=plan.storage)
    missing = [path for path in plan.needs if "://" not in path and not os.path.exists(path)]
    if missing:
        return bad("storage", node, "storage.empty", path=plan.storage, missing=", ".join(missing))
    return good("storage", node, "storage.there", path=plan.storage)


def refuses(plan: JobNeeds, node: str) -> Finding:
    """Whether everything that is to be read-only refuses to be written, found by trying."""
    taken = [path for path in plan.refuses if os.path.exists(path) and _can_be_written(path)]
    if taken:
        return bad("read_only", node, "read_only.writable", paths=", ".join(taken))
    return good("read_only", node, "read_only.refuses", path=plan.storage)


def takes(plan: JobNeeds, node: str, token: str) -> Finding:
    """Whether the folder that runs write to takes write, fsync and rename. The file stays until `forget`."""
    folder = _marked(plan)
    try:
        write_whole(_mark(folder, token, node), token)
    except OSError as error:
        words = {
            errno.ENOENT: "read_write.missing",
            errno.EROFS: "read_write.read_only",
            errno.ENOSPC: "read_write.full",
            errno.EDQUOT: "read_write.full",
        }.get(error.errno or 0, "read_write.refused")
        return bad("read_write", node, words, path=_shown(folder), reason=error.strerror or str(error))
    return good("read_write", node, "read_write.takes", path=_shown(folder))


def seen(plan: JobNeeds, token: str, writers: list[str]) -> list[str]:
    """Of the nodes that wrote, those whose file this node can read."""
    folder = _marked(plan)
    with contextlib.suppress(OSError):
        os.listdir(folder)  # a client of NFS looks again
    found = []
    for writer in writers:
        with contextlib.suppress(OSError):
            if _mark(folder, token, writer).read_text() == token:
                found.append(writer)
    return found


def forget(plan: JobNeeds, node: str, token: str) -> None:
    """Remove what `takes` wrote."""
    if plan.writable is not None:
        # Wherever it was: a run may have made the folder meanwhile.
        for folder in (Path(plan.writable), *Path(plan.writable).parents):
            with contextlib.suppress(OSError):
                _mark(str(folder), token, node).unlink()


def space(plan: JobNeeds, node: str) -> list[Finding]:
    """Whether there is room to save, and for temporary files."""
    findings = []
    folder = _existing(plan)
    with contextlib.suppress(OSError):
        free = _free(folder)
        values = {"path": _shown(folder), "free": free, "need": plan.free_bytes}
        level = bad if free < plan.free_bytes else good
        findings.append(level("space", node, "space.short" if level is bad else "space.free", **values))
    with contextlib.suppress(OSError):
        folder = tempfile.gettempdir()
        free = _free(folder)
        if free < _LEAST_TEMPORARY:
            findings.append(note("space", node, "space.short", path=folder, free=free, need=_LEAST_TEMPORARY))
    return findings


def _free(folder: str) -> int:
    about = os.statvfs(folder)
    return about.f_bavail * about.f_frsize


def _marked(plan: JobNeeds) -> str:
    """Where marks are left: in the folder that runs write to, or in the nearest above it if a run will make it."""
    assert plan.writable is not None
    return _existing(plan) if plan.made_by_run else plan.writable


def _existing(plan: JobNeeds) -> str:
    """The written folder, or the nearest above it that is there."""
    path = Path(plan.writable or ".")
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return str(path)


def _shown(folder: str) -> str:
    """A folder as people know it, without the stand-in for a run's that the doctor makes in an image."""
    above, name = os.path.split(folder)
    return above if name.startswith(MARK) else folder


def _mark(folder: str, token: str, node: str) -> Path:
    return Path(folder, f"{MARK}{token}-{node.replace('/', '_')}")


def _can_be_written(path: str) -> bool:
    """Try it, without changing a byte: a folder takes a new file, a file opens for writing."""
    probe = os.path.join(path, f"{MARK}probe-{os.getpid()}") if os.path.isdir(path) else path
    flags = os.O_WRONLY | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if probe != path else 0)
    try:
        os.close(os.open(probe, flags, 0o600))
    except OSError as error:
        return error.errno not in _REFUSALS
    if probe != path:
        os.unlink(probe)
    return True
