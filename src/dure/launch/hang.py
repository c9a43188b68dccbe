"""Notice that a team stands still, and say who waits for whom."""

from __future__ import annotations

import contextlib
import math
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dure.base.errors import Failure, RankFailed
from dure.base.files import write_whole
from dure.base.run_folder import RunFolder
from dure.launch import process_tree
from dure.launch.failure import tail
from dure.launch.rank import STACKS_OF_SCRIPT
from dure.launch.ranks import Ranks
from dure.launch.stacks import size_of
from dure.observe.heartbeat import Beat, Phase, read_beat

_LOOK_SECONDS = 0.25
_ANSWER_SECONDS = 3.0
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "stuck in the kernel: a disk or a driver",
    "T": "stopped",
    "t": "held by a debugger",
    "Z": "ended",
    "": "gone",
}


@dataclass(frozen=True)
class RankState:
    """Where one rank stands."""

    rank: int
    beat: Beat | None
    state: str
    """The kernel's letter for what its process does."""

    @property
    def waits(self) -> bool:
        """Whether the rank does nothing but wait for others."""
        return self.beat is not None and self.beat.phase is Phase.EXCHANGE and self.state not in ("T", "t")

    @property
    def done(self) -> bool:
        """Whether the rank has nothing more to do."""
        return self.beat is not None and self.beat.phase is Phase.DONE and self.state not in ("T", "t")


class HangWatch:
    """Looks at all heartbeats; when none has moved for `hang_seconds`, collects stacks and raises RankFailed."""

    def __init__(
        self, ranks: Ranks, folder: RunFolder, hang_seconds: float, *, is_script: bool = False
    ) -> None:
        """`is_script`: ranks beat if they like. They are watched as soon as all of them have, until one is done with
        its team; and are asked for stacks by a signal that scripts do not use."""
        self._is_script = is_script
        self._ranks = ranks
        self._folder = folder
        self._hang_seconds = hang_seconds
        self._last_look = -math.inf
        self._moved_at = time.monotonic()
        self._seen: list[Beat | None] = []
        self._furthest = -1

    def start_anew(self) -> None:
        """Watch a team that has just been started again."""
        self._moved_at = time.monotonic()
        self._seen = []

    def look(self) -> None:
        """Raise RankFailed if the team has stood still for too long."""
        now = time.monotonic()
        if now - self._last_look < _LOOK_SECONDS:
            return
        # A launcher that was itself stopped, or a laptop that slept, has not watched anyone meanwhile.
        if now - self._last_look > max(_LOOK_SECONDS * 20, self._hang_seconds / 2):
            self._moved_at = now
        self._last_look = now
        beats = self._beats()
        if beats != self._seen:
            self._seen = beats
            self._furthest = max([self._furthest, *(beat.step for beat in beats if beat is not None)])
            self._moved_at = now
        elif self._ranks.unwatched or not self._can_tell(beats):
            self._moved_at = now
        elif now - self._moved_at >= self._hang_seconds:
            raise RankFailed(self.verdict())

    @property
    def seen_step(self) -> int:
        """The highest step that any rank was seen in at the last look."""
        return self._furthest

    def furthest_step(self) -> int:
        """The highest step that any rank was ever seen in."""
        return max([self._furthest, *(beat.step for beat in self._beats() if beat is not None)])

    def _can_tell(self, beats: Sequence[Beat | None]) -> bool:
        """Whether beats that stand still mean anything; a script's may be those of the team before."""
        if not self._is_script:
            return True
        pids = [self._ranks.pids.get(rank) for rank in self._ranks.numbers]
        known = [beat for beat, pid in zip(beats, pids, strict=True) if beat is not None and beat.pid == pid]
        return len(known) == len(pids) and all(beat.phase is not Phase.DONE for beat in known)

    def _beats(self) -> list[Beat | None]:
        return [read_beat(self._folder.heartbeat(rank)) for rank in self._ranks.numbers]

    def verdict(self) -> Failure:
        """Collect the stacks of all ranks, and return who holds up the team, in words."""
        states = [
            RankState(rank, beat, self._ranks.state(rank))
            for rank, beat in zip(self._ranks.numbers, self._beats(), strict=True)
        ]
        message, culprit = who_waits_for_whom(states, time.monotonic_ns(), self._moved_at)
        self._collect_stacks(states)
        path = self._folder.stacks(culprit)
        with contextlib.suppress(OSError):
            message += f" Stacks: {path.parent}/"
        details = tail(path, lines=10_000)
        return Failure(
            message,
            rank=culprit,
            host=socket.gethostname(),
            details=details,
            may_pass=True,
            aftermath=all(state.waits or state.done for state in states),
        )

    def _collect_stacks(self, states: Sequence[RankState]) -> None:
        waiting = {state.rank: state for state in states if state.state}
        number = STACKS_OF_SCRIPT if self._is_script else signal.SIGUSR2
        for rank in list(waiting):
            # It would kill a script that is another program by now.
            if self._is_script and not process_tree.catches(self._ranks.pids[rank], number):
                del waiting[rank]
            else:
                self._ranks.send(rank, number)
        sizes: Mapping[int, int] = {}
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.1)
            before, sizes = sizes, {rank: size_of(self._folder.stacks(rank)) for rank in waiting}
            answered = all(size > 0 for rank, size in sizes.items() if waiting[rank].state not in ("T", "t"))
            if answered and sizes == before:
                break
        for state in states:
            path = self._folder.stacks(state.rank)
            if size_of(path) == 0:
                with contextlib.suppress(OSError):
                    write_whole(path, _no_answer(state, self._ranks.pids.get(state.rank)))


def who_waits_for_whom(states: Sequence[RankState], now_ns: int, moved_at: float) -> tuple[str, int]:
    """Say in one line who holds up the team, and return the rank to blame."""
    stuck = [s for s in states if not s.waits and not s.done]
    waiting = [s for s in states if s.waits]
    if not stuck and waiting:
        # Nobody computes. The ones that are furthest behind are the ones the others cannot get past.
        behind = min(s.beat.step for s in waiting if s.beat is not None)
        late = [s for s in waiting if s.beat is not None and s.beat.step == behind]
        if len(late) < len(waiting):
            stuck, waiting = late, [s for s in waiting if s not in late]
    if not stuck:
        blamed = waiting or list(states)
        seconds = _seconds(blamed[0], now_ns, moved_at)
        return (
            f"{_names(blamed)} have been in {_places(blamed)} for {seconds:.0f} s, and nobody comes: "
            "a message was lost, or the ranks disagree on what to exchange.",
            blamed[0].rank,
        )
    words = "; ".join(
        f"rank {s.rank} has been in {_place(s)} for {_seconds(s, now_ns, moved_at):.0f} s "
        f"({_STATES.get(s.state, s.state)})"
        for s in stuck
    )
    if waiting:
        plural = "" if len(waiting) > 1 else "s"
        whom = "it" if len(stuck) == 1 else "them"
        words += f"; {_names(waiting)} wait{plural} for {whom} in {_places(waiting)}"
    return words + ".", stuck[0].rank


def _names(states: Sequence[RankState]) -> str:
    ranks = ", ".join(str(s.rank) for s in states)
    return f"rank {ranks}" if len(states) == 1 else f"ranks {ranks}"


def _places(states: Sequence[RankState]) -> str:
    steps = sorted({s.beat.step for s in states if s.beat is not None})
    return f"the exchange of step {', '.join(str(step) for step in steps)}"


def _place(state: RankState) -> str:
    if state.beat is None:
        return Phase.STARTING.name
    return f"{state.beat.phase.name} of step {state.beat.step}"


def _seconds(state: RankState, now_ns: int, moved_at: float) -> float:
    since_ns = moved_at * 1e9 if state.beat is None else state.beat.at_ns
    return (now_ns - since_ns) / 1e9


def _no_answer(state: RankState, pid: int | None) -> str:
    lines = [f"rank {state.rank} (pid {pid}) gave no stacks: {_STATES.get(state.state, state.state)}."]
    if state.beat is not None:
        seconds = (time.monotonic_ns() - state.beat.at_ns) / 1e9
        lines.append(f"Its last beat: {_place(state)}, {seconds:.1f} s ago.")
    for name in ("wchan", "status", "stack"):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/{name}").read_text()
            lines.append(f"--- /proc/{pid}/{name}\n{text}")
    return "\n".join(lines) + "\n"
