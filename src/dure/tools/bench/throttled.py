"""A storage that is only so fast, for all ranks together: what a network file system or a bucket is in practice."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from pathlib import Path

from dure.storage import Access, Store

_PIECE = 256 * 1024
_TIME = struct.Struct("<d")


class ThrottledStore:
    """Reads through another store, at a rate that all processes share through a file.

    The file holds the moment at which all bytes handed out so far will have passed. A read books its bytes behind
    that, a piece at a time, so that ranks that read at once get equal parts of the rate.
    """

    def __init__(self, store: Store, file: Path, bytes_per_second: float) -> None:
        self._store = store
        self._rate = bytes_per_second
        self._file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @property
    def location(self) -> str:
        """See `Store`."""
        return self._store.location

    @property
    def access(self) -> Access:
        """See `Store`."""
        return self._store.access

    def size(self, path: str) -> int:
        """See `Store`."""
        return self._store.size(path)

    def names(self, folder: str) -> list[str]:
        """See `Store`."""
        return self._store.names(folder)

    def exists(self, path: str) -> bool:
        """See `Store`."""
        return self._store.exists(path)

    def read(self, path: str, start: int, length: int) -> bytes:
        """See `Store`."""
        content = self._store.read(path, start, length)
        self._wait(length)
        return content

    def read_into(self, path: str, start: int, into: memoryview) -> None:
        """See `Store`."""
        self._store.read_into(path, start, into)
        self._wait(len(into))

    def _wait(self, length: int) -> None:
        for at in range(0, length, _PIECE):
            until = self._book(min(_PIECE, length - at))
            time.sleep(max(0.0, until - time.monotonic()))

    def _book(self, length: int) -> float:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            kept = os.pread(self._file, _TIME.size, 0)
            before = _TIME.unpack(kept)[0] if len(kept) == _TIME.size else 0.0
            until = max(before, time.monotonic()) + length / self._rate
            os.pwrite(self._file, _TIME.pack(until), 0)
            return float(until)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
