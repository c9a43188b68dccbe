"""What ranks print, passed on to the console and kept in their log files."""

from __future__ import annotations

import os
import select
import selectors
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dure.launch.logs import open_log
from dure.say import say

_LINE_WAIT_SECONDS = 0.25


@dataclass
class _Stream:
    source: int
    console: int
    log: int
    pending: bytearray = field(default_factory=bytearray)
    """The start of a line whose end has not come yet."""


class Passthrough:
    """Copy every rank's output to the console, whole lines at a time where it comes in lines, and to its log.

    One thread for all ranks. Half a line (a prompt, a progress bar) is passed on after a moment.
    """

    def __init__(self, logs: Sequence[Path]) -> None:
        self._selector = selectors.DefaultSelector()
        self._deaf: set[int] = set()
        self._ends: list[tuple[int, int]] = []
        self._logs: list[int] = []
        self._deadline: float | None = None
        for log in logs:
            kept, trouble = open_log(log)
            if trouble:
                say(trouble)
            self._logs.append(kept)
            ends = []
            for console in (1, 2):
                source, end = os.pipe2(os.O_CLOEXEC)
                os.set_blocking(source, False)
                self._selector.register(source, selectors.EVENT_READ, _Stream(source, console, kept))
                ends.append(end)
            self._ends.append((ends[0], ends[1]))
        self._thread = threading.Thread(target=self._run, name="dure-passthrough", daemon=True)

    def ends(self, rank: int) -> tuple[int, int]:
        """Return the descriptors that a rank writes its stdout and stderr to."""
        return self._ends[rank]

    def start(self) -> None:
        """Close this process's copies of the writing ends, which the nursery has now, and begin."""
        for pair in self._ends:
            for end in pair:
                os.close(end)
        sys.stdout.flush()
        self._thread.start()

    def finish(self, seconds: float) -> None:
        """Pass on what the ended ranks left; a process that still holds a pipe is not waited for."""
        self._deadline = time.monotonic() + seconds
        if self._thread.is_alive():
            self._thread.join(seconds + 5)

    def _run(self) -> None:
        while self._selector.get_map():
            ready = self._selector.select(_LINE_WAIT_SECONDS)
            for key, _ in ready:
                self._read(key.data)
            if not ready:
                for key in list(self._selector.get_map().values()):
                    self._emit(key.data, len(key.data.pending))
                if self._deadline is not None and time.monotonic() > self._deadline:
                    break
        for key in list(self._selector.get_map().values()):
            self._close(key.data)
        for log in self._logs:
            os.close(log)
        self._selector.close()

    def _read(self, stream: _Stream) -> None:
        try:
            data = os.read(stream.source, 65536)
        except BlockingIOError:
            return
        if not data:
            self._emit(stream, len(stream.pending))
            self._close(stream)
            return
        stream.pending += data
        self._emit(stream, max(stream.pending.rfind(b"\n"), stream.pending.rfind(b"\r")) + 1)

    def _emit(self, stream: _Stream, length: int) -> None:
        if length:
            data = bytes(stream.pending[:length])
            del stream.pending[:length]
            self._write(stream.log, data)
            self._write(stream.console, data)

    def _write(self, descriptor: int, data: bytes) -> None:
        view = memoryview(data)
        while view and descriptor not in self._deaf:
            try:
                view = view[os.write(descriptor, view) :]
            except BlockingIOError:
                select.select([], [descriptor], [], 1.0)
            except OSError as error:
                # A closed console or a full disk must not stop the ranks; the other copy goes on.
                self._deaf.add(descriptor)
                if descriptor > 2:
                    self._write(2, f"dure: a rank's log is no longer written: {error}\n".encode())

    def _close(self, stream: _Stream) -> None:
        self._selector.unregister(stream.source)
        os.close(stream.source)
