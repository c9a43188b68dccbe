"""Which rank failed first, and in which words. Pure: no processes, no torch."""

from __future__ import annotations

import os
import signal
import socket
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

from dure.base.errors import (
    ComputedWrongly,
    DureError,
    Failure,
    PeerLost,
    RankFailed,
    Resumable,
    StorageError,
)
from dure.base.files import open_plain
from dure.base.say import redacted
from dure.device.words import MACHINE_FAULTS, PROGRAM_FAULTS

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
_MACHINE_WORDS = ("dataloader worker", "can't allocate memory", "out of memory", *MACHINE_FAULTS)
_BETTER_CAUSE_SECONDS = 5.0
"""For the rank that failed first: it may still unwind, on a machine that is busy with the others' ends."""
_TORCH_DISTRIBUTED_ERRORS = {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}


def describe(error: BaseException, rank: int) -> Failure:
    """Put an exception of this rank into words, from inside the `except` that caught it."""
    host = socket.gethostname()
    if isinstance(error, DureError):  # its message is written for people, and needs no traceback
        message, details = str(error), ""
    else:
        words = (
            f"sys.exit({error.code!r})"
            if isinstance(error, SystemExit)
            else "".join(traceback.format_exception_only(error)).strip()
        )
        message, details = f"rank {rank} on {host} failed: {words}", traceback_of(error)
    excludes = False
    if isinstance(error, ComputedWrongly) and error.rank >= 0:  # all ranks say it of one of them
        rank, host, excludes = error.rank, error.host, error.excludes
    return Failure(
        message=redacted(message),
        rank=rank,
        host=host,
        details=details,
        exit_code=error.exit_code if isinstance(error, DureError) else 1,
        may_pass=may_pass(error),
        aftermath=is_aftermath(error),
        at_ns=time.monotonic_ns(),
        excludes=excludes,
    )


def traceback_of(error: BaseException) -> str:
    """The traceback that people see, without the launcher's frames and without secrets."""
    frames = own_frames(error.__traceback__)
    return redacted("".join(traceback.format_exception(type(error), error, frames)))


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
    text = str(error).lower()
    if any(words in text for words in PROGRAM_FAULTS):
        return False
    names = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, OSError | MemoryError) or names & _MACHINE_ERRORS or is_aftermath(error):
        return True
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


def first_cause(failures: Iterable[Failure]) -> Failure:
    """Return the failure that explains the others. They must be of one host: their times are compared."""
    return min(
        failures, key=lambda failure: (failure.aftermath, not failure.killed, failure.at_ns, failure.rank)
    )


def settled_cause(failures: Sequence[Failure], others: int) -> Failure | None:
    """Return the cause; None while one of the `others` that failed first may still unwind and tell it."""
    if not failures:
        return None
    cause = first_cause(failures)
    waited = seconds_since(min(failure.at_ns for failure in failures))
    if cause.aftermath and others and waited < _BETTER_CAUSE_SECONDS:
        return None
    return cause


def seconds_since(monotonic_ns: int) -> float:
    """Seconds since a moment of this host's CLOCK_MONOTONIC."""
    return (time.monotonic_ns() - monotonic_ns) / 1e9


def ended_without_report(
    rank: int,
    exit_code: int,
    log: Path,
    *,
    at_ns: int = 0,
    returned: bool = False,
    silent: bool = True,
    host: str | None = None,
) -> Failure:
    """The failure of a rank whose process ended without saying why.

    `returned`: the rank had sent its value home before. `silent`: it could have said why, and did not.
    `host`: where the rank ran, if not here.
    """
    host = host or socket.gethostname()
    after = " after its function had returned" if returned else ""
    return Failure(
        f"rank {rank} on {host} {exit_words(exit_code, silent=silent)}{after}. Its output: {log}",
        rank=rank,
        host=host,
        details=tail(log),
        # A process that was killed, or left without a word, had no chance to say that it is the job's fault.
        may_pass=not returned,
        killed=exit_code < 0,
        at_ns=at_ns,
    )


def unsaved(failure: Failure) -> DureError:
    """What a run ends with whose ranks fail after they were asked to stop: it is not started again for that."""
    if not failure.may_pass:
        return RankFailed(failure)
    return Resumable(
        f"{failure.message} The run was asked to stop, so it is not started again; resumable: the same command with "
        "--run-dir goes on from its newest checkpoint"
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
