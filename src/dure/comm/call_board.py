"""Which call of the team each rank is in: so that ranks that wait for each other in different calls are told so.

A script may ask one rank alone to evaluate, or end its loop earlier on one rank. Then all ranks wait, each in another
collective, until their deadlines. A rank that has waited for some seconds leaves word in the team's store; when all
ranks wait, and not in the same call, nothing can come any more, and the process is ended with a message.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from dure.base.errors import PeerLost, UsageError
from dure.base.say import say
from dure.observe.heartbeat import Heartbeat, Phase

TELL_SECONDS = 5.0
"""How long a rank waits before it leaves word."""
LOOK_SECONDS = 0.5
_KEY = "calls/{rank}"
_LONGEST = 200
_ALL_ALIKE = (
    "all ranks must make the same calls, in the same order: is one of them behind `if team.is_leader`, or does a loop "
    "end earlier on one rank?"
)


@dataclass(frozen=True)
class Word:
    """What a rank left in the store."""

    call: str
    number: int
    """Of its calls; a later one means that it has gone on."""
    left: bool = False

    def as_text(self) -> str:
        """For the store."""
        return json.dumps([self.call, self.number, self.left])

    @classmethod
    def from_text(cls, text: str) -> Word | None:
        """The inverse; None for what no rank has left there: anybody who reaches the store can write to it."""
        try:
            call, number, left = json.loads(text)
        except (ValueError, TypeError, RecursionError):
            return None
        if not (isinstance(call, str) and type(number) is int and isinstance(left, bool)):
            return None
        return cls(call[:_LONGEST], number, left)


def verdict(words: dict[int, Word], ranks: int) -> str:
    """What is wrong when these ranks wait; "" when more must be known, or when it is nobody's misuse."""
    if len(words) < ranks or len({(word.call, word.left) for word in words.values()}) == 1:
        return ""
    by_call: dict[str, list[int]] = {}
    for rank, word in sorted(words.items()):
        by_call.setdefault(word.call, []).append(rank)
    places = "; ".join(
        f"{_names(of)} {'in ' if not words[of[0]].left else ''}{call}" for call, of in by_call.items()
    )
    return f"the ranks wait for each other in different calls: {places}. {_ALL_ALIKE}"


def _names(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


class CallBoard:
    """This rank's place on the board. The training thread enters and leaves calls; a thread of its own watches."""

    def __init__(self, store: Store | None, rank: int, ranks: int, heartbeat: Heartbeat) -> None:
        self._store = store if ranks > 1 else None
        self._rank = rank
        self._ranks = ranks
        self._heartbeat = heartbeat
        self._call: str | None = None
        self._number = 0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if self._store is not None:
            self._thread = threading.Thread(target=self._watch, name="calls", daemon=True)
            self._thread.start()

    @contextlib.contextmanager
    def inside(self, call: str, step: int | None = None) -> Iterator[None]:
        """Within `with`, this rank is in a call that all ranks make together; inner calls belong to the outer one."""
        if self._call is not None:
            yield
            return
        self._number += 1
        self._call = call if step is None else f"{call} of step {step}"
        try:
            yield
        except PeerLost as lost:
            raise self._explained(lost) from lost
        finally:
            self._call = None

    def leave(self) -> None:
        """This rank makes no more calls."""
        self._closing.set()
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # whoever holds the store may be gone already
                self._store.set(
                    _KEY.format(rank=self._rank), Word("has left the team", 0, left=True).as_text()
                )

    def _explained(self, lost: PeerLost) -> PeerLost | UsageError:
        """A lost peer that left on purpose was not lost."""
        left = [rank for rank, word in self._words().items() if word.left]
        if not left:
            return lost
        return UsageError(
            f"{_names(left)} has left the team, and rank {self._rank} is in {self._call}; {_ALL_ALIKE}"
        )

    def _words(self) -> dict[int, Word]:
        found: dict[int, Word] = {}
        if self._store is None:
            return found
        with contextlib.suppress(RuntimeError):
            for rank in range(self._ranks):
                key = _KEY.format(rank=rank)
                if self._store.check([key]):
                    word = Word.from_text(self._store.get(key).decode(errors="replace"))
                    if word is not None:
                        found[rank] = word
        return found

    def _watch(self) -> None:
        seen, since, told, before = (-1, (0, Phase.STARTING)), time.monotonic(), False, ""
        while not self._closing.wait(LOOK_SECONDS):
            now = (self._number, self._heartbeat.last)
            call, waits = self._call, now[1][1] is Phase.EXCHANGE
            if now != seen or call is None or not waits:
                seen, since, before = now, time.monotonic(), ""
                told = told and not self._tell("")
                continue
            if time.monotonic() - since < TELL_SECONDS:
                continue
            told = told or self._tell(Word(call, self._number).as_text())
            found = verdict(self._words(), self._ranks)
            if found and found == before:  # twice the same: nobody was just about to go on
                _end_process(found, self._rank)
            before = found

    def _tell(self, text: str) -> bool:
        try:
            assert self._store is not None
            self._store.set(_KEY.format(rank=self._rank), text)
        except RuntimeError:
            return False
        return True


def _end_process(message: str, rank: int, end: Callable[[int], object] = os._exit) -> None:
    """The training thread waits in native code, where no exception reaches it."""
    say(f"rank {rank}: {message}")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    end(UsageError.exit_code)
