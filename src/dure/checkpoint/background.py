"""Work that a step must not wait for: one thing at a time, in a thread of its own."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable

_NICE = 10
_LONGEST_PAUSE_SECONDS = 0.5


class Background:
    """A thread that is there for as long as the process, so that beginning something costs no more than saying so."""

    def __init__(self, name: str, *, gives_way: bool = False) -> None:
        """`gives_way`: at a lower priority than training. For work outside of Python only: a thread that waits for a
        core with Python's lock in its hand would keep training waiting too."""
        self._name = name
        self._gives_way = gives_way
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], float]] = queue.SimpleQueue()
        self._free = threading.Event()
        self._free.set()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self.cpu_seconds = 0.0
        """That the last call took."""

    @property
    def busy(self) -> bool:
        """Whether something is still being done."""
        return not self._free.is_set()

    def begin(self, call: Callable[[], None], pause_seconds: float = 0.0) -> None:
        """Have it done; nothing else may be under way.

        After a copy, a pause as long: the other ranks of the node may still be copying, and all wait for the last.
        """
        assert not self.busy, "one thing at a time"
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._free.clear()
        self._calls.put((call, min(pause_seconds, _LONGEST_PAUSE_SECONDS)))

    def wait(self, seconds: float) -> bool:
        """Wait so long for the end of what was begun; raises what that raised."""
        if not self._free.wait(seconds):
            return False
        error, self._error = self._error, None
        if error is not None:
            raise error
        return True

    def _run(self) -> None:
        if self._gives_way:
            with contextlib.suppress(OSError):  # not allowed here
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while True:
            call, pause_seconds = self._calls.get()
            time.sleep(pause_seconds)
            began = time.thread_time()
            try:
                call()
            except Exception as error:
                self._error = error
            self.cpu_seconds = time.thread_time() - began
            del call  # what it holds is the next step's
            self._free.set()
