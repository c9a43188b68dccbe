"""Whether a team that failed is started again. Pure: no processes, no torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from dure.base.errors import Failure, RankFailed


@dataclass(frozen=True)
class Restart:
    """One new start of a team, and why."""

    number: int
    """Of all restarts of the run, from 1."""
    without_progress: int
    """How many there have been since the run last got to a further step, this one included."""
    max_restarts: int
    cause: str
    rank: int
    step: int
    """The furthest step that the run has been in."""
    at_ns: int
    """When the failure was noticed: CLOCK_MONOTONIC of this host."""
    ranks: int
    """Of the new team on this node."""


@dataclass(frozen=True)
class UnsavedScript:
    """What is different for a script as long as it saves nothing with `team.checkpoint`: it is started again after any
    failure, as torchrun does, and nobody knows how far it has come unless it beats (`dure.heartbeat`)."""

    saves: Callable[[], bool]
    """Whether it has begun to save by now."""
    max_restarts: int


class RestartPolicy:
    """Counts restarts *without progress*: a run of weeks may lose a rank every day, a broken one must end.

    A team that may have fewer ranks goes on with one less before it is given up, and with one less again, until it
    gets further.
    """

    def __init__(
        self,
        max_restarts: int,
        ranks: int,
        min_ranks: int | None = None,
        script: UnsavedScript | None = None,
    ) -> None:
        """`script`: what holds until a script saves; `max_restarts` is for one that does."""
        self.restarts = 0
        self._script = script
        self.ranks = ranks
        """Of the next team on this node."""
        self._min_ranks = ranks if min_ranks is None else min_ranks
        self._max_restarts = max_restarts
        self._without_progress = 0
        self._furthest = -1
        self._first: Failure | None = None

    def after(self, failure: Failure, step: int) -> Restart:
        """The restart that `failure`, in a run that has come as far as `step`, is answered with.

        Raises RankFailed, which the run ends with, instead: with `failure` itself if trying again cannot help, or with
        the first of those failures that came one after the other without progress.
        """
        script = None if self._script is None or self._script.saves() else self._script
        most = self._max_restarts if script is None else script.max_restarts
        if failure.excludes and most and self.ranks > self._min_ranks:
            self.ranks -= 1
            return self.without(failure, step)
        if most == 0 or not (failure.may_pass or script is not None):
            raise RankFailed(failure)
        if self._first is None or step > self._furthest:
            self._first, self._furthest, self._without_progress = failure, step, 0
        if self._without_progress < most:
            self._without_progress += 1
        elif self.ranks > self._min_ranks:
            self.ranks -= 1
        else:
            raise self._given_up(self._first, most)
        return self._restart(failure, step, most)

    def without(self, failure: Failure, step: int) -> Restart:
        """A restart without the rank, or the node, of a failure: another team, which begins to count anew."""
        self._first, self._without_progress = None, 0
        return self._restart(failure, step, self._max_restarts)

    def _restart(self, failure: Failure, step: int, most: int) -> Restart:
        self.restarts += 1
        return Restart(
            number=self.restarts,
            without_progress=self._without_progress,
            max_restarts=most,
            cause=failure.message,
            rank=failure.rank,
            step=step,
            at_ns=time.monotonic_ns(),
            ranks=self.ranks,
        )

    def _given_up(self, first: Failure, most: int) -> RankFailed:
        tried = "once" if most == 1 else f"{most} times"
        if self._furthest < 0:
            message = f"{first.message} The team was started again {tried} and failed again."
        else:
            furthest = self._furthest
            message = f"{first.message} The team was started again {tried} and came no further than step {furthest}."
        return RankFailed(replace(first, message=message, may_pass=False))
