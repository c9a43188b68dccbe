"""What ranks print, passed on to the console and kept in their log files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import selectors
import struct
import sys
import termios
import threading
import time
import tty
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dure.base.say import say
from dure.launch.logs import open_log

_LINE_WAIT_SECONDS = 0.25
_BURST_SECONDS = 0.005
"""Between two looks at ranks that print a lot: `python -u` writes every line by itself, and waking up for each of them
costs more than the line."""
_PIPE_BYTES = 1 << 20
_MOST_PENDING = 1 << 20
"""A line that is longer is passed on in parts."""


@dataclass
class _Stream:
    source: int
    console: int
    log: int
    pending: bytearray = field(default_factory=bytearray)
    """The start of a line whose end has not come yet."""


class Passthrough:
    """Copy every rank's output to the console, whole lines at a time where it comes in lines, and to its log.

    One thread for all ranks. Half a line (a prompt, a progress bar) is passed on after a moment. A rank's standard
    output is a terminal where the launcher's is, and of the same size; so is its standard error. Where both of the
    launcher's are the same file, both of a rank's are too, so that what it prints stays in order; where they are not,
    the order between the two is kept only as far as they are written one after the other with a pause between.
    """

    def __init__(self, logs: Sequence[Path]) -> None:
        self._selector = selectors.DefaultSelector()
        self._deaf: set[int] = set()
        self._ends: list[tuple[int, int]] = []
        self._logs: list[int] = []
        self._terminals: list[tuple[int, int]] = []
        """(console, our side of a rank's terminal)."""
        self._sizes: dict[int, bytes] = {}
        self._deadline: float | None = None
        self._buffer = bytearray(_PIPE_BYTES)
        one_console = _same_file(1, 2)
        for log in logs:
            kept, trouble = open_log(log)
            if trouble:
                say(trouble)
            self._logs.append(kept)
            out = self._open(1, kept)
            self._ends.append((out, out if one_console else self._open(2, kept)))
        self._thread = threading.Thread(target=self._run, name="dure-passthrough", daemon=True)

    def ends(self, rank: int) -> tuple[int, int]:
        """Return the descriptors that a rank writes its stdout and stderr to; they may be the same one."""
        return self._ends[rank]

    def start(self) -> None:
        """Close this process's copies of the writing ends, which the prefork server has now, and begin."""
        for end in {end for pair in self._ends for end in pair}:
            os.close(end)
        sys.stdout.flush()
        self._thread.start()

    def finish(self, seconds: float) -> None:
        """Pass on what the ended ranks left; a process that still holds a pipe is not waited for."""
        self._deadline = time.monotonic() + seconds
        if self._thread.is_alive():
            self._thread.join(seconds + 5)

    def _open(self, console: int, log: int) -> int:
        """Listen to one more stream; returns the descriptor to write to."""
        source, end = self._terminal(console) if os.isatty(console) else _pipe()
        os.set_blocking(source, False)
        self._selector.register(source, selectors.EVENT_READ, _Stream(source, console, log))
        return end

    def _terminal(self, console: int) -> tuple[int, int]:
        try:
            ours, theirs = os.openpty()
        except OSError:  # no /dev/pts here, or none left
            return _pipe()
        tty.setraw(theirs)  # bytes pass unchanged: the real terminal adds its own carriage returns
        self._terminals.append((console, ours))
        self._follow_size()
        return ours, theirs

    def _follow_size(self) -> None:
        """Give the ranks' terminals the size of the launcher's; a size of its own goes to a new one too."""
        for console, ours in self._terminals:
            with contextlib.suppress(OSError):  # the launcher's is closed
                size = fcntl.ioctl(console, termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
                if self._sizes.get(ours) != size:
                    fcntl.ioctl(ours, termios.TIOCSWINSZ, size)
                    self._sizes[ours] = size

    def _run(self) -> None:
        read_at = 0.0
        while self._selector.get_map():
            ready = self._selector.select(_LINE_WAIT_SECONDS)
            if ready and time.monotonic() - read_at < _BURST_SECONDS:
                time.sleep(_BURST_SECONDS)
                ready = self._selector.select(0)
            for key, _ in ready:
                self._read(key.data)
            read_at = time.monotonic()
            if self._terminals:
                self._follow_size()
            if not ready:
                for key in list(self._selector.get_map().values()):
                    self._emit_pending(key.data)
                if self._deadline is not None and time.monotonic() > self._deadline:
                    break
        for key in list(self._selector.get_map().values()):
            self._close(key.data)
        for log in self._logs:
            os.close(log)
        self._selector.close()

    def _read(self, stream: _Stream) -> None:
        try:
            length = os.readv(stream.source, [self._buffer])
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.EIO:  # how a terminal says that nobody writes to it any more
                raise
            length = 0
        if length == 0:
            self._emit_pending(stream)
            self._close(stream)
            return
        whole = self._buffer.rfind(b"\n", 0, length) + 1
        whole = max(whole, self._buffer.rfind(b"\r", whole, length) + 1)
        with memoryview(self._buffer) as data:
            if whole and stream.pending:
                stream.pending += data[:whole]
                self._emit_pending(stream)
            elif whole:
                self._emit(stream, data[:whole])
            stream.pending += data[whole:length]
        if len(stream.pending) > _MOST_PENDING:
            self._emit_pending(stream)

    def _emit_pending(self, stream: _Stream) -> None:
        if stream.pending:
            with memoryview(stream.pending) as data:
                self._emit(stream, data)
            stream.pending.clear()

    def _emit(self, stream: _Stream, data: memoryview) -> None:
        self._write(stream.log, data)
        self._write(stream.console, data)

    def _write(self, descriptor: int, data: memoryview) -> None:
        while data and descriptor not in self._deaf:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:
                select.select([], [descriptor], [], 1.0)
            except OSError as error:
                # A closed console or a full disk must not stop the ranks; the other copy goes on.
                self._deaf.add(descriptor)
                if descriptor > 2:
                    said = f"dure: a rank's log is no longer written: {error}\n".encode()
                    self._write(2, memoryview(said))

    def _close(self, stream: _Stream) -> None:
        self._selector.unregister(stream.source)
        self._terminals = [pair for pair in self._terminals if pair[1] != stream.source]
        os.close(stream.source)


def _same_file(first: int, second: int) -> bool:
    try:
        return os.path.sameopenfile(first, second)
    except OSError:  # one of them is closed
        return False


def _pipe() -> tuple[int, int]:
    source, end = os.pipe2(os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a user's pipes may be limited; a smaller one is only slower
        fcntl.fcntl(source, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return source, end
