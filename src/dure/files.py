"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import uuid
from collections.abc import Iterable
from pathlib import Path

_PART = ".part"
_DIRECT = getattr(os, "O_DIRECT", 0)
_LEAST_DIRECT_BYTES = 1 << 20


def write_whole(
    path: Path, content: bytes | str | Iterable[bytes | memoryview], *, only_if_absent: bool = False
) -> None:
    """Write `content` under `path` so that a reader, or a crash, sees the old file or the new one.

    Large parts that begin at a page, in memory and in the file, go to the disk from where they are: through the page
    cache they would cost the processor more than hashing them, and push out of it what others read.

    `only_if_absent` raises FileExistsError when there is a file already: of several writers, one wins.
    """
    if isinstance(content, str):
        content = content.encode()
    parts = [content] if isinstance(content, bytes) else content
    temporary = path.with_name(f".{uuid.uuid4().hex}{_PART}")
    # Not `tempfile`, which makes files for their owner's eyes: whom the umask lets may read the result.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        try:
            _write_all(descriptor, parts)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if only_if_absent:
            # A rename would replace another's file; a link is refused when the name is taken, on NFS too.
            os.link(temporary, path)
            os.unlink(temporary)
        else:
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(path.parent)


def _write_all(descriptor: int, parts: Iterable[bytes | memoryview]) -> None:
    at, direct = 0, _DIRECT
    for part in parts:
        view = memoryview(part).cast("B")
        pages = _whole_pages(view) if direct and at % mmap.PAGESIZE == 0 else 0
        done = 0
        if pages:
            done = _write_past_cache(descriptor, view[:pages])
            direct = _DIRECT if done == pages else 0
        while done < len(view):
            done += os.write(descriptor, view[done:])
        at += done


def _whole_pages(view: memoryview) -> int:
    """How many bytes of it can go past the page cache; 0 when it is not worth it."""
    if view.readonly or len(view) < _LEAST_DIRECT_BYTES:
        return 0
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    return 0 if address % mmap.PAGESIZE else len(view) // mmap.PAGESIZE * mmap.PAGESIZE


def _write_past_cache(descriptor: int, view: memoryview) -> int:
    """Returns the bytes written: fewer than all where the file system cannot do it, or is full."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    done = 0
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _DIRECT)
        while done < len(view):
            done += os.write(descriptor, view[done:])
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return done


def is_unfinished(name: str) -> bool:
    """Whether a file of this name is what `write_whole` left when it was killed."""
    return name.startswith(".") and name.endswith(_PART)


def make_folders(folder: Path) -> None:
    """Make `folder` and those above it that are not there, so that a crash does not lose them again."""
    if folder.is_dir():
        return
    make_folders(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make what was created or renamed in `folder` survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
