"""What every kind of shared storage can do, and the paths that it takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from dure.base.errors import StorageError
from dure.storage.access import Access


class Store(Protocol):
    """Files under relative, `/`-separated paths. Whatever goes wrong is a StorageError in plain words.

    Threads may share a store. Nothing is cached: every call asks the storage, and is counted.
    """

    @property
    def location(self) -> str:
        """As a person wrote it: `/fsx/job` or `s3://bucket/prefix`."""
        ...

    @property
    def access(self) -> Access:
        """What this store has done since it was opened."""
        ...

    def size(self, path: str) -> int:
        """How many bytes the file has."""
        ...

    def read(self, path: str, start: int, length: int) -> bytes:
        """Exactly these bytes of the file, or a StorageError."""
        ...

    def read_into(self, path: str, start: int, into: memoryview) -> None:
        """Fill `into`, to its last byte, with the file's bytes from `start` on; without another copy."""
        ...

    def exists(self, path: str) -> bool:
        """Whether there is a file (not a folder) of this path."""
        ...

    def names(self, folder: str) -> list[str]:
        """The names in a folder, of files and folders, one level, sorted; none when there is no such folder.

        An empty `folder` is the storage's own top.
        """
        ...

    def write_whole(
        self, path: str, parts: Iterable[bytes | memoryview], *, only_if_absent: bool = False
    ) -> None:
        """Write a file so that readers see all of it or none; makes the folders above it.

        With `only_if_absent`, a file that is there already is a StorageError: of several writers, one wins.
        """
        ...

    @property
    def renames(self) -> bool:
        """Whether a folder can get another name, with all in it, at once. S3 has no such thing."""
        ...

    def rename_folder(self, folder: str, to: str) -> None:
        """Give a folder another name; a reader, or a crash, sees the old name or the new one."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file; no error when it is gone already."""
        ...

    def remove_tree(self, folder: str) -> None:
        """Remove a folder and all in it; no error when it is gone already."""
        ...


def clean_path(location: str, path: str, *, may_be_top: bool = False) -> str:
    """`path` without `.` and doubled slashes; a StorageError when it could leave the storage."""
    if path.startswith("/"):
        raise _bad(location, path, "is absolute; paths in storage are relative to its top")
    if "\0" in path:
        raise _bad(location, path, "has a NUL character in it")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise _bad(location, path, "is not valid Unicode") from None
    names = [name for name in path.split("/") if name not in ("", ".")]
    if ".." in names:
        raise _bad(location, path, 'has ".." in it; paths may not leave the storage')
    if not names and not may_be_top:
        raise _bad(location, path, "names no file")
    return "/".join(names)


def span_of(start: int, length: int) -> None:
    """Refuse a span that no file can have; a mistake of the caller, not of the storage."""
    if start < 0 or length < 0:
        raise ValueError(f"cannot read {length} bytes from byte {start} on")


def flat(view: memoryview) -> memoryview:
    """The same memory as plain bytes."""
    return view.cast("B") if view.nbytes else memoryview(b"")


def truncated(location: str, path: str, size: int, start: int, length: int) -> StorageError:
    """The error for a file that ends too early."""
    return StorageError(
        f"{location}: {path} is {size:,} bytes long, but bytes {start:,} to {start + length:,} were asked for; "
        "is it truncated, or still being copied?"
    )


def taken(location: str, path: str) -> StorageError:
    """The error of `only_if_absent` for the writer that came second."""
    return StorageError(f"{location}: {path} is there already, and only a new file was to be written")


def _bad(location: str, path: str, why: str) -> StorageError:
    return StorageError(f"{location}: the path {path!r} {why}")
