"""Ctrl-C and friends, as a request that the launcher meets at its next look.

Where ranks can stop at a step and save, the first one asks them to; the second stops everything at once.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from dure.errors import StoppedAtOnce
from dure.launch.lease import Lease

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_GENTLE = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""What a user, Slurm or a spot instance's end says to a run that may still save."""


class StopSignals:
    """Within `with`, the signals that ask the launcher to stop are remembered instead of obeyed.

    An exception out of a signal handler could strike anywhere, also between the birth of a rank and the
    note of its pid; a second Ctrl-C could strike the clearing up after the first.
    """

    def __init__(self, ask_ranks: Callable[[str], None] | None = None, lease: Lease | None = None) -> None:
        """`ask_ranks` asks them to stop at their next step, and is given the name of the signal.

        The end of the `lease` is looked for at the same times, and comes before any signal.
        """
        self._ask_ranks = ask_ranks
        self._lease = lease
        self._asked = False
        self._received: list[signal.Signals] = []
        self._at_once = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in (*_SIGNALS, *(_GENTLE if self._ask_ranks is not None else ())):
            if number in self._before:
                continue
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup: what was ignored stays ignored
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received.append(signal.Signals(number))
        if self._at_once:
            self._at_once = False
            self.check(gently=False)

    def check(self, *, gently: bool = True) -> None:
        """Raise StoppedAtOnce if a signal has come; where ranks can be asked, only for a second one.

        Raises LeaseOver when the lease has ended.
        """
        if self._lease is not None:
            self._lease.check()
        if not self._received:
            return
        first = self._received[0]
        name = "Ctrl-C" if first is signal.SIGINT else first.name
        if gently and self._ask_ranks is not None and first in _GENTLE and len(self._received) == 1:
            if not self._asked:
                self._asked = True
                self._ask_ranks(name)
            return
        last = self._received[-1]
        name = "Ctrl-C" if last is signal.SIGINT else last.name
        raise StoppedAtOnce(f"stopped at once by {name}; all ranks are ended.", 128 + last)

    @contextlib.contextmanager
    def obeyed_at_once(self) -> Iterator[None]:
        """Let a signal raise right away, in a stretch of code where that harms nothing."""
        self._at_once = True
        try:
            self.check(gently=False)
            yield
        finally:
            self._at_once = False
        self.check(gently=False)
