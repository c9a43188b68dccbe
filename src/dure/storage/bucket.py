"""Shared storage as a prefix of an S3 bucket, through obstore: Amazon's, or any server that speaks S3.

obstore retries what may pass (5xx, resets, timeouts) with growing pauses, and goes on where a body broke off.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain

from dure.base.errors import StorageError
from dure.storage.access import Access
from dure.storage.answers import reason_for, status_of
from dure.storage.connection import connect, refuse_after_fork
from dure.storage.layout import EVERYTHING, Rights
from dure.storage.protocol import clean_path, flat, span_of, taken, truncated

PIECE_BYTES = 8 << 20
"""One request reads or writes at most this much; larger reads and writes have several under way at once."""
_AT_ONCE = 4
_CHUNK_BYTES = 1 << 20
_PARTS_AT_MOST = 10_000
_DELETES_A_REQUEST = 1000
_REPEAT_SECONDS = 1.5
_REPEAT_PAUSE_SECONDS = 0.1

_WRITE_MARK = "dure-write"


class BucketStore:
    """`s3://bucket/prefix` as a store. Nothing is sent before the first call."""

    def __init__(self, location: str, rights: Rights = EVERYTHING) -> None:
        self.location = location
        self.access = Access()
        self._rights = rights
        self._server = connect(location)

    def size(self, path: str) -> int:
        """See `Store.size`."""
        path = self._clean(path)
        with self.access.timed(), self._plainly("look at", path):
            return self._size(path)

    def read(self, path: str, start: int, length: int) -> bytes:
        """See `Store.read`."""
        path = self._clean(path)
        span_of(start, length)
        with self.access.timed(), self._plainly("read", path):
            if length == 0:
                self._check_end(path, start)
                return b""
            return b"".join(self._chunks(path, start, length))

    def read_into(self, path: str, start: int, into: memoryview) -> None:
        """See `Store.read_into`."""
        path = self._clean(path)
        view = flat(into)
        span_of(start, len(view))
        with self.access.timed(), self._plainly("read", path):
            if not view:
                self._check_end(path, start)
            elif len(view) <= PIECE_BYTES:
                self._fill(path, start, view)
            else:
                self._fill_at_once(path, start, view)

    def exists(self, path: str) -> bool:
        """See `Store.exists`."""
        import obstore

        path = self._clean(path)
        with self.access.timed(), self._plainly("look at", path):
            self.access.read()
            try:
                obstore.head(self._server.reads, path)
            except FileNotFoundError:
                return False
            return True

    def names(self, folder: str) -> list[str]:
        """See `Store.names`."""
        import obstore

        folder = clean_path(self.location, folder, may_be_top=True)
        with self.access.timed(), self._plainly("list", folder or "its top"):
            self.access.read()
            found = obstore.list_with_delimiter(self._server.reads, folder or None)
            paths = [*found["common_prefixes"], *(each["path"] for each in found["objects"])]
            # Some tools keep an empty object named like the folder, with a slash, to show an empty folder.
            return sorted({path.rpartition("/")[2] for path in paths if path != folder})

    def write_whole(
        self, path: str, parts: Iterable[bytes | memoryview], *, only_if_absent: bool = False
    ) -> None:
        """See `Store.write_whole`. With `only_if_absent` the content is held in memory and sent at once, as
        S3 has no condition on a multipart upload that all servers know.
        """
        path = self._clean(path)
        self._rights.check(self.location, path)
        with self.access.timed(), self._plainly("write", path):
            rest = (flat(memoryview(part)) for part in parts)
            first: list[memoryview] = []
            held = 0
            for part in rest:
                first.append(part)
                held += len(part)
                if held > PIECE_BYTES and not only_if_absent:
                    return self._put_parts(path, chain(first, rest))
            if only_if_absent:
                return self._create(path, b"".join(first))
            return self._put(path, b"".join(first))

    @property
    def renames(self) -> bool:
        """See `Store.renames`."""
        return False

    def rename_folder(self, folder: str, to: str) -> None:
        """See `Store.rename_folder`."""
        raise StorageError(f"{self.location}: cannot rename {folder} to {to}: S3 has no folders to rename")

    def remove(self, path: str) -> None:
        """See `Store.remove`."""
        import obstore

        path = self._clean(path)
        self._rights.check(self.location, path)
        with self.access.timed(), self._plainly("remove", path):
            self.access.wrote()
            obstore.delete(self._server.writes, path)

    def remove_tree(self, folder: str) -> None:
        """See `Store.remove_tree`."""
        import obstore

        folder = self._clean(folder)
        self._rights.check(self.location, folder)
        with self.access.timed(), self._plainly("remove", folder):
            for found in obstore.list(self._server.reads, folder, chunk_size=_DELETES_A_REQUEST):
                self.access.read()
                self.access.wrote()
                obstore.delete(self._server.writes, [each["path"] for each in found])

    def _clean(self, path: str) -> str:
        return clean_path(self.location, path)

    def _size(self, path: str) -> int:
        import obstore

        self.access.read()
        try:
            return obstore.head(self._server.reads, path)["size"]
        except FileNotFoundError:
            # The answer to HEAD has no words; those of GET tell a missing bucket from a missing file.
            self.access.read()
            return obstore.get(self._server.reads, path, options={"range": (0, 1)}).meta["size"]

    def _check_end(self, path: str, start: int) -> None:
        """S3 has no reads of no bytes; still, nothing starts behind the end."""
        size = self._size(path)
        if start > size:
            raise truncated(self.location, path, size, start, 0)

    def _chunks(self, path: str, start: int, length: int) -> Iterator[bytes]:
        """The bytes of one request, as they come."""
        import obstore
        from obstore.exceptions import GenericError

        self.access.read()
        try:
            found = obstore.get(self._server.reads, path, options={"range": (start, start + length)})
        except GenericError as error:
            if status_of(error) != 416:
                raise
            raise truncated(self.location, path, self._size(path), start, length) from None
        # Known before the body comes: a header that lies about a length makes nobody fetch the whole file.
        if found.range != (start, start + length):
            size = found.meta["size"]
            del found  # an error keeps what its frames hold, here an open connection
            raise truncated(self.location, path, size, start, length)
        for chunk in found.stream(min_chunk_size=_CHUNK_BYTES):
            self.access.read(len(chunk), requests=0)
            yield chunk

    def _fill(self, path: str, start: int, view: memoryview) -> None:
        done = 0
        for chunk in self._chunks(path, start, len(view)):
            view[done : done + len(chunk)] = chunk
            done += len(chunk)
        if done != len(view):
            raise StorageError(f"{self.location}: {path} gave {done:,} of {len(view):,} bytes; try again")

    def _fill_at_once(self, path: str, start: int, view: memoryview) -> None:
        """Several requests at once, each straight into its own part: one stream of S3 is slower than a node."""
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="s3") as threads:
            pieces = [
                threads.submit(self._fill, path, start + at, view[at : at + PIECE_BYTES])
                for at in range(0, len(view), PIECE_BYTES)
            ]
            try:
                for piece in pieces:
                    piece.result()
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def _put(self, path: str, content: bytes) -> None:
        import obstore

        self.access.wrote()
        obstore.put(self._server.writes, path, content, use_multipart=False)
        self.access.wrote(len(content), requests=0)

    def _put_parts(self, path: str, parts: Iterable[memoryview]) -> None:
        import obstore

        total = 0

        def counted() -> Iterator[memoryview]:
            nonlocal total
            for part in parts:
                total += len(part)
                if total > PIECE_BYTES * _PARTS_AT_MOST:
                    limit = PIECE_BYTES * _PARTS_AT_MOST
                    raise StorageError(f"{self.location}: {path} is larger than {limit:,} bytes; split it")
                yield part

        # When a part fails, or the caller's iterator does, obstore aborts the upload: nothing appears.
        obstore.put(
            self._server.writes,
            path,
            counted(),
            use_multipart=True,
            chunk_size=PIECE_BYTES,
            max_concurrency=_AT_ONCE,
        )
        # One request begins the upload, one ends it.
        self.access.wrote(total, requests=2 + -(-total // PIECE_BYTES))

    def _create(self, path: str, content: bytes) -> None:
        """Write if nobody has: of several writers the server lets one win."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, GenericError

        mark = {_WRITE_MARK: uuid.uuid4().hex}
        began = time.monotonic()
        written = False
        while not written:
            try:
                self.access.wrote()
                obstore.put(
                    self._server.writes, path, content, mode="create", use_multipart=False, attributes=mark
                )
                written = True
            except AlreadyExistsError:
                # What a try wrote whose answer was lost stands in the way of the next. The mark tells it from
                # another writer's.
                self.access.read()
                found = obstore.get(self._server.reads, path).attributes.get(_WRITE_MARK)
                written = found == mark[_WRITE_MARK]
                if not written:
                    raise taken(self.location, path) from None
            except GenericError as error:
                # obstore does not repeat a write with a condition when the connection broke. With a mark it is safe.
                if status_of(error) is not None or time.monotonic() - began > _REPEAT_SECONDS:
                    raise
                time.sleep(_REPEAT_PAUSE_SECONDS)
        self.access.wrote(len(content), requests=0)

    @contextmanager
    def _plainly(self, verb: str, path: str) -> Iterator[None]:
        """Say in plain words what the server or obstore says in many."""
        from obstore.exceptions import BaseError

        refuse_after_fork(self.location)
        try:
            yield
        except (BaseError, FileNotFoundError) as error:
            # Only obstore's own have no number; another is about a file of the caller's.
            if isinstance(error, FileNotFoundError) and error.errno is not None:
                raise
            why = reason_for(error, self._server.server, self._server.bucket)
            raise StorageError(f"{self.location}: cannot {verb} {path}: {why}") from error
