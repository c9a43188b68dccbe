"""Signals that ask the launcher to stop, remembered until its next look.

Where ranks can stop at a step and save, the first one asks them to; a second one stops at once. Where they cannot
(`dure run`), the first one is passed on to the ranks, which have a grace; a second one ends it.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from dure.base.errors import StoppedAtOnce
from dure.launch.lease import Lease

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_GENTLE = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""What a user, a closed terminal, Slurm or a spot instance's end says to a run that may still save."""
_NOT_FOR_US = (signal.SIGUSR1, signal.SIGUSR2)
"""Sent to every process of a Slurm step, or by mistake: their default would kill the launcher, and all its ranks."""


class StopSignals:
    """Within `with`, the signals that ask the launcher to stop are remembered instead of obeyed, and those that mean
    nothing to it are ignored.

    An exception out of a signal handler could strike anywhere, also between the start of a rank and the
    note of its pid; a second Ctrl-C could strike the clearing up after the first.
    """

    def __init__(
        self,
        ask_ranks: Callable[[str], None] | None = None,
        lease: Lease | None = None,
        can_ask: Callable[[], bool] = lambda: True,
    ) -> None:
        """`ask_ranks` asks them to stop at their next step, and is given the name of the signal; `can_ask` says whether
        they would, by now.

        The end of the `lease` is looked for at the same times, and comes before any signal.
        """
        self.asked_at: float | None = None
        """When the ranks were asked to stop at a step (`time.monotonic`), by a signal or by `asked_elsewhere`."""
        self._ask_ranks = ask_ranks
        self._can_ask = can_ask
        self._lease = lease
        self._received: list[signal.Signals] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in _NOT_FOR_US:
            if signal.getsignal(number) is signal.SIG_DFL:
                self._before[number] = signal.signal(number, _pass)
        for number in (*_SIGNALS, *(_GENTLE if self._ask_ranks is not None else ())):
            ignored = number not in self._before and signal.getsignal(number) is signal.SIG_IGN
            if not ignored:  # nohup: what was ignored stays ignored
                before = signal.signal(number, self._receive)
                self._before.setdefault(number, before)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def received(self) -> signal.Signals | None:
        """The first signal that asked to stop, if one has come."""
        return self._received[0] if self._received else None

    def again(self) -> bool:
        """Whether a further signal asks not to wait any longer.

        A hang-up is no such signal: a closed terminal sends it, and the shell that ran in it sends it again.
        """
        return any(number is not signal.SIGHUP for number in self._received[1:])

    def asked_elsewhere(self) -> None:
        """Note that the ranks have been asked to stop by somebody else, such as another node."""
        if self.asked_at is None:
            self.asked_at = time.monotonic()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received.append(signal.Signals(number))

    def check(self, *, gently: bool = True) -> None:
        """Raise StoppedAtOnce if a signal has come; where ranks can be asked, `gently`, only for a second one.

        Raises LeaseOver when the lease has ended.
        """
        if self._lease is not None:
            self._lease.check()
        if not self._received:
            return
        ask = self._ask_ranks if self.asked_at is not None or self._can_ask() else None
        if ask is None:  # nobody asks such ranks anything: for them it means nothing
            self._received = [number for number in self._received if number not in _NOT_FOR_US]
        first = self.received
        if first is None:
            return
        if signal.SIGHUP in self._received:
            _forget_closed_output()
        if gently and ask is not None and first in _GENTLE and not self.again():
            if self.asked_at is None:
                self.asked_at = time.monotonic()
                ask(in_words(first))
            return
        last = next((number for number in reversed(self._received) if number is not signal.SIGHUP), first)
        how = "at once " if ask is not None or self.again() else ""
        raise StoppedAtOnce(f"stopped {how}by {in_words(last)}; all ranks are ended.", 128 + last)


def _pass(number: int, frame: FrameType | None) -> None:
    """Not SIG_IGN: that would look as if the user had it ignored, to another StopSignals within this one."""


def in_words(number: signal.Signals) -> str:
    """How the user knows a signal."""
    return "Ctrl-C" if number is signal.SIGINT else number.name


def _forget_closed_output() -> None:
    """Let standard output and error go nowhere where their terminal is closed: writing would fail from now on."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    gone = [descriptor for descriptor, events in poll.poll(0) if events & (select.POLLHUP | select.POLLERR)]
    if gone:
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        for descriptor in gone:
            os.dup2(nowhere, descriptor)
        os.close(nowhere)
