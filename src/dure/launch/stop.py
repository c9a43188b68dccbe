"""Ctrl-C and friends, as a request that the launcher meets at its next look."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

from dure.errors import StoppedAtOnce

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class StopSignals:
    """Within `with`, the signals that ask the launcher to stop are remembered instead of obeyed.

    An exception out of a signal handler could strike anywhere, also between the birth of a rank and the
    note of its pid; a second Ctrl-C could strike the clearing up after the first.
    """

    def __init__(self) -> None:
        self._received: signal.Signals | None = None
        self._at_once = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup: what was ignored stays ignored
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received is None:
            self._received = signal.Signals(number)
        if self._at_once:
            self._at_once = False
            self.check()

    def check(self) -> None:
        """Raise StoppedAtOnce if a signal has come."""
        if self._received is not None:
            name = "Ctrl-C" if self._received is signal.SIGINT else self._received.name
            raise StoppedAtOnce(f"stopped at once by {name}; all ranks are ended.", 128 + self._received)

    @contextlib.contextmanager
    def obeyed_at_once(self) -> Iterator[None]:
        """Let a signal raise right away, in a stretch of code where that harms nothing."""
        self._at_once = True
        try:
            self.check()
            yield
        finally:
            self._at_once = False
        self.check()
