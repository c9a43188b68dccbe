"""Which rank failed first, and in which words. Pure: no processes, no torch."""

from __future__ import annotations

import os
import signal
import socket
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType

from dure.base.errors import DureError, PeerLost, RankFailed, Resumable, StorageError
from dure.base.files import open_plain
from dure.base.say import redacted

_LOST_CONNECTION = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connection was likely closed",
    "broken pipe",
    "socket closed",
    "gloo/transport",
)
_MACHINE_ERRORS = {"OutOfMemoryError", "AcceleratorError"}  # torch's: named, so that it need not be imported
_MACHINE_WORDS = ("dataloader worker", "can't allocate memory", "out of memory", "cuda error", "nccl error")
_BETTER_CAUSE_SECONDS = 5.0
"""For the rank that failed first: it may still unwind, on a machine that is busy with the others' ends."""
_TORCH_DISTRIBUTED_ERRORS = {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}


@dataclass(frozen=True)
class RankError:
    """What a rank says of its own failure. Written as JSON into the run's folder."""

    rank: int
    host: str
    pid: int
    type: str
    message: str
    traceback: str
    exit_code: int
    """What the command shall end with."""
    expected: bool
    """A `DureError`: its message is written for people and needs no traceback."""
    aftermath: bool
    """Another rank's failure, seen from here."""
    may_pass: bool
    """The machine's failure, not the job's: trying again may help."""
    at_ns: int
    """CLOCK_MONOTONIC of this host."""


def describe(error: BaseException, rank: int) -> RankError:
    """Put an exception of this rank into words, from inside the `except` that caught it."""
    if isinstance(error, SystemExit):
        message = f"sys.exit({error.code!r})"
    else:
        message = "".join(traceback.format_exception_only(error)).strip()
    return RankError(
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        type=type(error).__name__,
        message=redacted(str(error) if isinstance(error, DureError) else message),
        traceback=redacted(
            "".join(traceback.format_exception(type(error), error, own_frames(error.__traceback__)))
        ),
        exit_code=error.exit_code if isinstance(error, DureError) else 1,
        expected=isinstance(error, DureError),
        aftermath=is_aftermath(error),
        may_pass=may_pass(error),
        at_ns=time.monotonic_ns(),
    )


def is_aftermath(error: BaseException | None) -> bool:
    """Whether an exception looks like what is seen when *another* rank has gone."""
    while error is not None:
        names = {kind.__name__ for kind in type(error).__mro__}
        text = str(error).lower()
        if isinstance(error, PeerLost | ConnectionError) or names & _TORCH_DISTRIBUTED_ERRORS:
            return True
        if isinstance(error, RuntimeError) and any(words in text for words in _LOST_CONNECTION):
            return True
        error = error.__cause__
    return False


def may_pass(error: BaseException) -> bool:
    """Whether an exception looks like the machine's fault.

    Everything that a step computes is seeded, so what the job itself does wrong it does again at the same
    step: only memory, files, processes and connections can be better the next time.
    """
    if isinstance(error, DureError):
        return isinstance(error, StorageError | PeerLost)
    if isinstance(error, FileNotFoundError | FileExistsError | IsADirectoryError | NotADirectoryError):
        return False
    names = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, OSError | MemoryError) or names & _MACHINE_ERRORS or is_aftermath(error):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _MACHINE_WORDS)


def own_frames(frames: TracebackType | None) -> TracebackType | None:
    """Drop the launcher's frames, and the import machinery's, from the top of a traceback."""
    here = str(Path(__file__).parent)
    while frames is not None and frames.tb_next is not None:
        name = frames.tb_frame.f_code.co_filename
        if not (name.startswith((here, "<frozen")) or Path(name).name == "runpy.py"):
            break
        frames = frames.tb_next
    return frames


class Weight(IntEnum):
    """How far a fault explains the run's end; the lightest is the cause."""

    SIGNAL = 0
    CAUSE = 1
    AFTERMATH = 2


@dataclass(frozen=True)
class Fault:
    """One rank's failure as the launcher sees it: its own words if it left any, and how it ended."""

    rank: int
    weight: Weight
    at_ns: int
    error: RankError | None
    exit_code: int | None
    """Negative for a signal; None while the process still ends."""


def fault_of(rank: int, error: RankError | None, exit_code: int | None, at_ns: int) -> Fault:
    """Weigh one rank's failure."""
    if error is not None:
        weight = Weight.AFTERMATH if error.aftermath else Weight.CAUSE
        return Fault(rank, weight, error.at_ns, error, exit_code)
    signalled = exit_code is not None and exit_code < 0
    return Fault(rank, Weight.SIGNAL if signalled else Weight.CAUSE, at_ns, None, exit_code)


def first_cause(faults: Iterable[Fault]) -> Fault:
    """Return the fault that explains the others."""
    return min(faults, key=lambda fault: (fault.weight, fault.at_ns, fault.rank))


def settled_cause(faults: Sequence[Fault], others: int) -> Fault | None:
    """Return the cause; None while one of the `others` that failed first may still unwind and tell it."""
    if not faults:
        return None
    cause = first_cause(faults)
    waited = seconds_since(min(fault.at_ns for fault in faults))
    if cause.weight is Weight.AFTERMATH and others and waited < _BETTER_CAUSE_SECONDS:
        return None
    return cause


def seconds_since(monotonic_ns: int) -> float:
    """Seconds since a moment of this host's CLOCK_MONOTONIC."""
    return (time.monotonic_ns() - monotonic_ns) / 1e9


def rank_failed(
    fault: Fault, log: Path, *, returned: bool = False, silent: bool = True, host: str | None = None
) -> RankFailed:
    """Turn the cause into the error that the command ends with.

    `returned`: the rank had sent its value home before. `silent`: it could have said why, and did not.
    `host`: where the rank ran, if not here.
    """
    host = host or socket.gethostname()
    error = fault.error
    if error is not None:
        message = (
            error.message if error.expected else f"rank {fault.rank} on {error.host} failed: {error.message}"
        )
        details = "" if error.expected else error.traceback
        return RankFailed(
            message,
            rank=fault.rank,
            host=error.host,
            details=details,
            exit_code=error.exit_code,
            may_pass=error.may_pass,
            aftermath=error.aftermath,
        )
    after = " after its function had returned" if returned else ""
    words = exit_words(fault.exit_code or 0, silent=silent)
    message = f"rank {fault.rank} on {host} {words}{after}. Its output: {log}"
    # A process that was killed, or left without a word, had no chance to say that it is the job's fault.
    return RankFailed(message, rank=fault.rank, host=host, details=tail(log), may_pass=not returned)


def unsaved(failed: RankFailed) -> DureError:
    """What a run ends with whose ranks fail after they were asked to stop: it is not started again for that."""
    if not failed.may_pass:
        return failed
    return Resumable(
        f"{failed} The run was asked to stop, so it is not started again; resumable: the same command with --run-dir "
        "goes on from its newest checkpoint"
    )


def exit_words(exit_code: int, *, silent: bool = True) -> str:
    """Say how a process ended that left no word of its own; `silent`: one of our own making, which leaves stacks."""
    if exit_code >= 0:
        hint = " and without a word (os._exit, or a library's exit?)" if silent else ""
        return f"ended with exit code {exit_code}{hint}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    stacks = "; the Python stacks are in its output" if silent else ""
    hints = {
        "SIGKILL": ": out of memory, or someone's kill -9",
        "SIGSEGV": f": a crash in native code{stacks}",
        "SIGABRT": f": native code gave up{stacks}",
        "SIGBUS": ": mapped memory that is not there; a full disk, or a full /dev/shm?",
        "SIGILL": ": built for another processor?",
        "SIGTERM": ": someone else's kill?",
    }
    return f"was killed by {name}{hints.get(name, '')}"


def tail(path: Path, lines: int = 40) -> str:
    """Return the last lines of a log, as far as it can be read."""
    try:
        with open(open_plain(path), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 64 * 1024))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
