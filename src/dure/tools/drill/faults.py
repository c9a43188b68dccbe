"""What can go wrong, on purpose. Each fault disturbs a run at a step and says when it did."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dure.base.errors import DureError, UsageError
from dure.observe.heartbeat import Beat
from dure.tools.drill.attempt import Attempt

_PAUSE_SECONDS = 0.7


@dataclass(frozen=True)
class Injected:
    """A fault that has happened."""

    at: float
    """CLOCK_MONOTONIC."""
    step: int
    """The furthest step that a rank was in."""
    noticed_at: float | None = None
    """Where the drill itself is the one who notices: the launcher was killed."""


@dataclass(frozen=True)
class InjectedFault:
    """A way to disturb a run."""

    inject: Callable[[Attempt, int, random.Random], Injected]
    restarts: bool = True
    """Whether the team has to start again because of it."""
    arguments: tuple[str, ...] = ()
    """What the run is given for it to matter."""
    prepare: Callable[[Path], None] | None = None
    clear: Callable[[Path], None] | None = None
    """Of the folder that checkpoints go to: before and after the run."""


def chosen(names: str) -> dict[str, InjectedFault]:
    """The faults of a list with commas."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in FAULTS]
    if unknown or not wanted:
        raise UsageError(f"--faults {names}: known are {', '.join(FAULTS)}, with commas between them")
    return {name: FAULTS[name] for name in wanted}


def _signal_ranks(
    attempt: Attempt, step: int, number: signal.Signals, dice: random.Random | None
) -> Injected:
    """Send a signal to one rank, or without dice to all."""
    beats = attempt.wait_for_step(step)
    victims = beats if dice is None else [dice.choice(beats)]
    at = time.monotonic()
    for beat in victims:
        os.kill(beat.pid, number)
    return Injected(at, _furthest(beats))


def _kill_rank(attempt: Attempt, step: int, dice: random.Random) -> Injected:
    return _signal_ranks(attempt, step, signal.SIGKILL, dice)


def _segfault(attempt: Attempt, step: int, dice: random.Random) -> Injected:
    return _signal_ranks(attempt, step, signal.SIGSEGV, dice)


def _stop_rank(attempt: Attempt, step: int, dice: random.Random) -> Injected:
    return _signal_ranks(attempt, step, signal.SIGSTOP, dice)


def _kill_all(attempt: Attempt, step: int, dice: random.Random) -> Injected:
    return _signal_ranks(attempt, step, signal.SIGKILL, None)


def _slow_rank(attempt: Attempt, step: int, dice: random.Random) -> Injected:
    """Hold one rank for a moment, three times: it is late, not lost."""
    beats = attempt.wait_for_step(step)
    victim = dice.choice(beats)
    at = time.monotonic()
    for _ in range(3):
        os.kill(victim.pid, signal.SIGSTOP)
        time.sleep(_PAUSE_SECONDS)
        os.kill(victim.pid, signal.SIGCONT)
        time.sleep(_PAUSE_SECONDS / 10)
    return Injected(at, _furthest(beats))


def _kill_agent(attempt: Attempt, step: int, dice: random.Random) -> Injected:
    """Kill the launcher, and with it its memory: only storage is left. Then launch again, as a person would."""
    injected = _end_launcher(attempt, step)
    attempt.start()
    return injected


def _corrupt_latest(attempt: Attempt, step: int, dice: random.Random) -> Injected:
    injected = _end_launcher(attempt, step)
    path = dice.choice(_files_of_latest(attempt))
    at = dice.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << dice.randrange(8))]))
    attempt.start()
    return injected


def _truncate_latest(attempt: Attempt, step: int, dice: random.Random) -> Injected:
    injected = _end_launcher(attempt, step)
    path = dice.choice(_files_of_latest(attempt))
    os.truncate(path, dice.randrange(path.stat().st_size))
    attempt.start()
    return injected


def _fill_disk(attempt: Attempt, step: int, dice: random.Random) -> Injected:
    """Fill the disk that checkpoints go to, to the last byte."""
    beats = attempt.wait_for_step(step)
    at = time.monotonic()
    try:
        with (checkpoints(attempt.folder.path) / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
    except OSError:
        return Injected(at, _furthest(beats))


def _small_disk(folder: Path) -> None:
    if os.geteuid() != 0:
        raise DureError("a small disk can be mounted by root only")
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], check=True)


def _no_small_disk(folder: Path) -> None:
    subprocess.run(["umount", "--lazy", folder], check=False)


def checkpoints(run: Path) -> Path:
    """Where a drill's runs keep their checkpoints."""
    return run / "checkpoints"


def _end_launcher(attempt: Attempt, step: int) -> Injected:
    beats = attempt.wait_for_step(step)
    at = time.monotonic()
    os.kill(attempt.launcher, signal.SIGKILL)
    return Injected(at, _furthest(beats), attempt.wait_until_gone())


def _files_of_latest(attempt: Attempt) -> list[Path]:
    """The files of the newest checkpoint; there must be one before it to fall back on."""
    folder = checkpoints(attempt.folder.path)
    whole = sorted({manifest.parent for manifest in folder.glob("*/manifest.json")})
    if not whole:
        raise DureError(
            f"{folder} has no checkpoint to damage: the job saves none, or its steps are too fast"
        )
    return [path for path in sorted(whole[-1].iterdir()) if path.is_file() and path.stat().st_size]


def _furthest(beats: list[Beat]) -> int:
    return max(beat.step for beat in beats)


FAULTS: Mapping[str, InjectedFault] = {
    "kill-rank": InjectedFault(_kill_rank),
    "kill-all": InjectedFault(_kill_all),
    "kill-agent": InjectedFault(_kill_agent),
    "stop-rank": InjectedFault(_stop_rank, arguments=("--set", "team.hang_seconds=8")),
    "segfault": InjectedFault(_segfault),
    "corrupt-latest": InjectedFault(_corrupt_latest),
    "truncate-latest": InjectedFault(_truncate_latest),
    "disk-full": InjectedFault(_fill_disk, restarts=False, prepare=_small_disk, clear=_no_small_disk),
    "slow-rank": InjectedFault(_slow_rank, restarts=False),
}
