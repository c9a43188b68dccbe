"""Shared storage as a folder: a local disk, NFS, a mount of FSx for Lustre."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dure.base.errors import StorageError
from dure.base.files import is_unfinished, make_folders, sync_folder, write_whole
from dure.storage.access import Access
from dure.storage.layout import EVERYTHING, Rights
from dure.storage.protocol import clean_path, flat, span_of, taken, truncated

_REASONS = {
    errno.ENOENT: "there is no such file (any more); is the path right, and the storage mounted on this node?",
    errno.EACCES: "this user has no permission; ask its owner, or run as another user",
    errno.EPERM: "this user has no permission; ask its owner, or run as another user",
    errno.ENOTDIR: "a part of its path is a file, not a folder",
    errno.EISDIR: "it is a folder, not a file",
    errno.EIO: "the disk or the file server reports an I/O error; look into the system's log",
    errno.ESTALE: "the file server has replaced or lost it (stale handle); mount the storage again",
    errno.ETIMEDOUT: "the file server does not answer",
    errno.ENOSPC: "the storage is full",
    errno.EDQUOT: "the quota is used up",
    errno.EROFS: "the storage is mounted read-only",
    errno.ENAMETOOLONG: "its name is too long for this file system",
    errno.ELOOP: "its links lead in a circle",
}
_GONE = (errno.ENOENT, errno.ENOTDIR)
_REMOVALS = 10


class FolderStore:
    """A folder as a store. Reads are plain positional reads: never mmap, which a network file system pages
    in slowly, and answers with SIGBUS when a file shrinks or a server is lost.

    Links are followed when reading, as model folders are often made of them. Writing follows none that leads
    to another place, but for the writable folder itself, which may be a link to a scratch disk.
    """

    def __init__(self, location: str, rights: Rights = EVERYTHING) -> None:
        self.location = location
        self.access = Access()
        self._rights = rights
        self._top = Path(location).expanduser().absolute()
        with self._plainly("open", "it"):
            if not stat.S_ISDIR(os.stat(self._top).st_mode):
                raise StorageError(f"{location}: is a file, but storage is a folder or s3://bucket/prefix")

    def size(self, path: str) -> int:
        """See `Store.size`."""
        path = self._clean(path)
        with self.access.timed(), self._plainly("look at", path):
            self.access.read()
            found = os.stat(self._top / path)
            self._only_files(path, found)
            return found.st_size

    def read(self, path: str, start: int, length: int) -> bytes:
        """See `Store.read`."""
        path = self._clean(path)
        with self._opened(path, start, length) as descriptor:
            content = bytearray(length)
            self._fill(descriptor, path, start, memoryview(content))
            return bytes(content)

    def read_into(self, path: str, start: int, into: memoryview) -> None:
        """See `Store.read_into`."""
        path = self._clean(path)
        view = flat(into)
        with self._opened(path, start, len(view)) as descriptor:
            self._fill(descriptor, path, start, view)

    def exists(self, path: str) -> bool:
        """See `Store.exists`."""
        path = self._clean(path)
        with self.access.timed(), self._plainly("look at", path):
            self.access.read()
            try:
                return stat.S_ISREG(os.stat(self._top / path).st_mode)
            except OSError as error:
                if error.errno in _GONE:
                    return False
                raise

    def names(self, folder: str) -> list[str]:
        """See `Store.names`."""
        folder = clean_path(self.location, folder, may_be_top=True)
        with self.access.timed(), self._plainly("list", folder or "its top"):
            self.access.read()
            try:
                names = os.listdir(self._top / folder)
            except FileNotFoundError:
                return []
            return sorted(name for name in names if not is_unfinished(name))

    def write_whole(
        self, path: str, parts: Iterable[bytes | memoryview], *, only_if_absent: bool = False
    ) -> None:
        """See `Store.write_whole`."""
        path = self._clean(path)
        with self.access.timed(), self._plainly("write", path):
            target = self._writable(path)
            make_folders(target.parent)
            try:
                write_whole(target, self._counted(parts), only_if_absent=only_if_absent)
            except FileExistsError:
                raise taken(self.location, path) from None

    @property
    def renames(self) -> bool:
        """See `Store.renames`."""
        return True

    def rename_folder(self, folder: str, to: str) -> None:
        """See `Store.rename_folder`."""
        folder, to = self._clean(folder), self._clean(to)
        with self.access.timed(), self._plainly("rename", folder):
            source, target = self._writable(folder), self._writable(to)
            self.access.wrote()
            os.rename(source, target)
            sync_folder(target.parent)

    def remove(self, path: str) -> None:
        """See `Store.remove`."""
        path = self._clean(path)
        with self.access.timed(), self._plainly("remove", path):
            target = self._writable(path)
            self.access.wrote()
            with suppress(FileNotFoundError):
                os.unlink(target)

    def remove_tree(self, folder: str) -> None:
        """See `Store.remove_tree`."""
        folder = self._clean(folder)
        with self.access.timed(), self._plainly("remove", folder):
            target = self._writable(folder)
            self.access.wrote()
            # Another rank may be removing it too: what it takes away meanwhile is no error, but ends a pass.
            for _ in range(_REMOVALS):
                if not os.path.lexists(target):
                    return
                with suppress(FileNotFoundError):
                    shutil.rmtree(target)
            if os.path.lexists(target):
                raise StorageError(f"{self.location}: cannot remove {folder}: others keep writing in it")

    def _clean(self, path: str) -> str:
        return clean_path(self.location, path)

    def _writable(self, path: str) -> Path:
        """The file's place, when the rights allow it and no link leads elsewhere."""
        self._rights.check(self.location, path)
        if self._rights.folders is None:
            top, real_top = self._top, self._top.resolve()
        else:
            top = self._top / next(folder for folder in self._rights.folders if path.startswith(f"{folder}/"))
            real_top = top.resolve()
            # A link to another part of this storage would make read-only parts writable.
            own_place = self._top.resolve() / top.name
            if real_top != own_place and real_top.is_relative_to(self._top.resolve()):
                raise StorageError(
                    f"{self.location}: cannot write {path}: {top.name} is a link to {real_top}"
                )
        target = self._top / path
        real_folder = target.parent.resolve()
        if real_folder != real_top / target.parent.relative_to(top):
            raise StorageError(
                f"{self.location}: cannot write {path}: a link leads to {real_folder}; remove the link"
            )
        return target

    @contextmanager
    def _opened(self, path: str, start: int, length: int) -> Iterator[int]:
        """The file's descriptor, once it is known to be a file that has these bytes."""
        span_of(start, length)
        with self.access.timed(), self._plainly("read", path):
            # Without O_NONBLOCK, opening a named pipe would wait for ever; a file does not care.
            descriptor = os.open(self._top / path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                found = os.fstat(descriptor)
                self._only_files(path, found)
                # Before anything is allocated: the length may come from a header that lies.
                if start + length > found.st_size:
                    raise truncated(self.location, path, found.st_size, start, length)
                yield descriptor
            finally:
                os.close(descriptor)

    def _fill(self, descriptor: int, path: str, start: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            # Linux gives at most 2 GiB at once, and a network file system may give less. (Python itself
            # repeats a call that a signal interrupted.)
            got = os.preadv(descriptor, [view[done:]], start + done)
            self.access.read(got)
            if got == 0:
                raise truncated(self.location, path, os.fstat(descriptor).st_size, start, len(view))
            done += got

    def _only_files(self, path: str, found: os.stat_result) -> None:
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(found.st_mode):
            raise StorageError(f"{self.location}: {path} is no plain file but a pipe, a socket or a device")

    def _counted(self, parts: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for part in parts:
            yield part
            self.access.wrote(memoryview(part).nbytes)

    @contextmanager
    def _plainly(self, verb: str, path: str) -> Iterator[None]:
        """Say in plain words what the operating system says in numbers."""
        try:
            yield
        except OSError as error:
            reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
            raise StorageError(f"{self.location}: cannot {verb} {path}: {reason}") from error
