"""Files that appear whole or not at all, and files that no other user can make us write or wait for."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import uuid
from collections.abc import Iterable
from pathlib import Path

_ROOT = 0
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


def open_own(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a file to write it: a plain file of this user's, in a folder that no other user's link leads to.

    PermissionError otherwise, and nothing was written, created or truncated then; never waits for a pipe's reader.
    """
    folder = _open_own_folder(path.parent)
    try:
        # O_TRUNC only once it is known whose file this is.
        asked = flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(path.name, asked, mode, dir_fd=folder)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise _not_ours(path, "is a symbolic link; remove it") from None
            if error.errno == errno.ENXIO:
                raise _not_ours(path, "is a pipe or a device; remove it") from None
            raise OSError(error.errno, error.strerror, str(path)) from None
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise _not_ours(path, "is a pipe, a socket or a device; remove it")
            if not _is_ours(found.st_uid, folder):
                raise _not_ours(path, f"belongs to another user (uid {found.st_uid}); remove it")
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & os.O_APPEND)
            if flags & os.O_TRUNC:
                os.ftruncate(descriptor, 0)
        except BaseException:
            os.close(descriptor)
            raise
    finally:
        os.close(folder)
    return descriptor


def open_plain(path: Path) -> int:
    """Open a plain file to read it; OSError at once for a pipe, a socket or a device, which could keep us for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder, not a file", str(path))
    raise OSError(errno.EINVAL, "it is no plain file but a pipe, a socket or a device", str(path))


def read_at_most(path: Path, most_bytes: int) -> bytes:
    """The content of a plain file; OSError when it is longer, before anything is read."""
    with open(open_plain(path), "rb") as file:
        if os.fstat(file.fileno()).st_size <= most_bytes:
            content = file.read(most_bytes + 1)
            if len(content) <= most_bytes:
                return content
    raise OSError(errno.EFBIG, f"it is longer than {most_bytes:,} bytes", str(path))


def make_own_folder(folder: Path) -> None:
    """Make a folder for files of our own, if it is not there; PermissionError for one that is another user's."""
    folder.mkdir(parents=True, exist_ok=True)
    os.close(_open_own_folder(folder))


def _open_own_folder(folder: Path) -> int:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR) or not folder.is_symlink():
            raise
        # A run folder may be a link to a larger disk, if we made it.
        owner = os.lstat(folder).st_uid
        if owner not in (os.geteuid(), _ROOT):
            raise _not_ours(
                folder, f"is a symbolic link of another user's (uid {owner}); remove it"
            ) from None
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    owner = os.fstat(descriptor).st_uid
    if not _is_ours(owner, descriptor):
        os.close(descriptor)
        raise _not_ours(
            folder, f"belongs to another user (uid {owner}), who could replace what is written there"
        )
    return descriptor


def _is_ours(owner: int, folder: int) -> bool:
    """Whether a file of this owner is as good as our own: ours, or root's."""
    if owner in (os.geteuid(), _ROOT):
        return True
    # A file server may know us by another number (root squashing): what we make there tells which.
    name = f".{uuid.uuid4().hex}{_PART}"
    try:
        probe = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError:
        return False
    try:
        return os.fstat(probe).st_uid == owner
    finally:
        os.close(probe)
        os.unlink(name, dir_fd=folder)


def _not_ours(path: Path, why: str) -> PermissionError:
    return PermissionError(errno.EPERM, f"{path} {why}")
