"""One launch at a time in a run folder: two would write each other's logs, events and checkpoints.

An flock, held for as long as the launcher lives and let go by the kernel however it ends, so that no stale lock is ever
in the way. On NFS it holds between nodes too (Linux 2.6.12 and later).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from types import TracebackType

from dure.base.errors import UsageError
from dure.base.files import open_own
from dure.base.run_folder import RunFolder
from dure.base.say import say

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What file systems answer that know no locks."""
_LOOK_SECONDS = 0.2


class RunLock:
    """Within `with`, the run folder is this launcher's; UsageError when it is another's. The folder must be there."""

    def __init__(self, folder: RunFolder, wait_seconds: float = 0.0) -> None:
        """`wait_seconds`: how long another launch, one that is about to end, may take to let go of it."""
        self._folder = folder
        self._wait_seconds = wait_seconds
        self._descriptor = -1

    def __enter__(self) -> RunLock:
        path = self._folder.lock
        try:
            # To write: NFS gives an exclusive lock for nothing less. Never removed: another might be waiting for it.
            self._descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise UsageError(f"cannot claim the run folder {self._folder.path}: {error.strerror}") from None
        try:
            self._lock()
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                holder = self._holder()
                os.close(self._descriptor)
                raise UsageError(
                    f"{self._folder.path} is in use: {holder} trains there; wait for it, stop it, or give another "
                    "--run-dir"
                ) from None
            say(
                f"{self._folder.path} is on a file system without locks ({error.strerror}): nothing keeps a "
                "second launch out of it"
            )
        self._sign()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def _lock(self) -> None:
        deadline = time.monotonic() + self._wait_seconds
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno in _NO_LOCKS or time.monotonic() > deadline:
                    raise
            time.sleep(_LOOK_SECONDS)

    def _sign(self) -> None:
        words = json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode()
        with contextlib.suppress(OSError):  # a full disk: the lock holds without a name on it
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, words, 0)

    def _holder(self) -> str:
        try:
            told = json.loads(os.pread(self._descriptor, 4096, 0))
            return f"process {told['pid']} on {told['host']}"
        except (OSError, ValueError, KeyError, TypeError):  # it has come only just now
            return "another launch"
