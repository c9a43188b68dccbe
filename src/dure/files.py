"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable
from pathlib import Path

_PART = ".part"


def write_whole(
    path: Path, content: bytes | str | Iterable[bytes | memoryview], *, only_if_absent: bool = False
) -> None:
    """Write `content` under `path` so that a reader, or a crash, sees the old file or the new one.

    `only_if_absent` raises FileExistsError when there is a file already: of several writers, one wins.
    """
    if isinstance(content, str):
        content = content.encode()
    parts = [content] if isinstance(content, bytes) else content
    temporary = path.with_name(f".{uuid.uuid4().hex}{_PART}")
    # Not `tempfile`, which makes files for their owner's eyes: whom the umask lets may read the result.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
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
