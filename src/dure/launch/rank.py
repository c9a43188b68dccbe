"""The life of one rank, from the fork to its last word. Runs in the rank."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import json
import os
import pickle
import select
import signal
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from dure.backend import stand_in_for_gloo
from dure.base.errors import DureError, Failure
from dure.base.files import open_own, write_whole
from dure.base.run_folder import RunFolder
from dure.base.say import keep_output_harmless, say, say_through
from dure.comm.process_groups import keep_process_groups
from dure.launch import own_state, process_tree
from dure.launch.failure import describe, traceback_of
from dure.launch.logs import open_log
from dure.launch.main_module import run_as_main
from dure.launch.prefork import RankRequest
from dure.launch.preloaded import LateSettings, Preloaded
from dure.launch.title import rank_title, set_title
from dure.observe.heartbeat import Heartbeat, Phase

STACKS_OF_SCRIPT = signal.SIGRTMAX - 5
"""Asks a rank of `dure run` for its stacks: a signal that no script uses, and only sent to one that waits for it."""
WATCH_VARIABLE = "DURE_WATCH"
"""Set by `dure run --watch`: whether silent mistakes of scripts are told (`warn`), or are errors (`strict`)."""
_HEADER = struct.Struct("<Q")
_LONGEST_WORDS = 800
"""With up to four bytes a letter, and what pickle adds, less than a pipe takes at once (4096 bytes)."""


@dataclass(frozen=True)
class Call:
    """Work: call a function, and send home what it returns."""

    entry: str
    """`package.module:function`, resolved in the rank."""
    args: bytes
    threads: int
    folder: RunFolder
    search_path: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        """What other processes see of it."""
        return [self.entry, str(self.folder.path)]


@dataclass(frozen=True)
class Script:
    """Work: run a script or a module as `__main__`, in an interpreter that has imported torch."""

    target: str
    argv: tuple[str, ...]
    module: bool
    folder: RunFolder

    @property
    def words(self) -> list[str]:
        """What other processes see of it."""
        return [self.target, *self.argv]


@dataclass(frozen=True)
class Command:
    """Work: become another program."""

    argv: tuple[str, ...]


@dataclass(frozen=True)
class RankStart:
    """All that a rank needs to begin."""

    rank: int
    env: dict[str, str]
    folder: str
    """The working directory."""
    log: Path
    work: Call | Script | Command
    again: bool = False
    """Whether a rank of this number ran before, in the same run: its log goes on."""


@dataclass(frozen=True)
class Said:
    """Something the user should know at once, from a rank whose log and events may be lost."""

    text: str
    unwatched: bool = False
    """Whether this rank has no heartbeat file: nobody can see then whether it hangs."""


@dataclass(frozen=True)
class Returned:
    """The rank's last word when all went well; the value stays pickled until somebody asks for it."""

    value: bytes


def live(
    request: RankRequest, server_pid: int, fresh_path: list[str], preloaded: Mapping[str, Mapping[str, str]]
) -> int:
    """Be the rank that `request` asks for. Returns the exit code of the process, or never.

    `preloaded` are the packages that are imported already, with the environment variables that this has set.
    """
    process_tree.die_with(server_pid)
    os.setsid()  # as under torchrun: a terminal's Ctrl-C goes to the launcher, which ends the ranks
    os.set_inheritable(request.report, False)
    start: RankStart = pickle.loads(request.start)
    watch = start.env.pop(WATCH_VARIABLE, "off")  # a script sees what it sees under torchrun
    os.environ.clear()
    os.environ.update(start.env)
    say_through(lambda text: _tell(request.report, Said(text[:_LONGEST_WORDS])))
    try:
        os.chdir(start.folder)
        _redirect(request, start.log, again=start.again)
    except OSError as error:  # the folder is gone, or the disk is full
        _send(request.report, describe(error, start.rank))
        return 1
    work = start.work
    if isinstance(work, Command):
        os.execvp(work.argv[0], work.argv)
    set_title(*rank_title(start.rank, start.env.get("WORLD_SIZE", "?"), work.words))
    own_state.renew()
    if isinstance(work, Script):
        return _run_script(work, start, request.report, fresh_path, preloaded, watch)
    keep_output_harmless()
    _leave(_call(work, start.rank, request.report))


def _run_script(
    script: Script,
    start: RankStart,
    report: int,
    fresh_path: list[str],
    preloaded: Mapping[str, Mapping[str, str]],
    watch: str,
) -> int:
    faulthandler.enable()  # a crash in native code leaves the Python stacks in the log
    stacks_on(STACKS_OF_SCRIPT, script.folder.stacks(start.rank))
    keep_process_groups()
    stand_in_for_gloo(os.environ)  # torch may be imported already
    _watch(watch, script.folder)
    settings = LateSettings(preloaded, speaks=start.env.get("LOCAL_RANK") == "0")
    hidden = Preloaded(preloaded, settings.look)

    def tell(error: BaseException) -> None:
        _send(report, describe(error, start.rank))

    try:
        return run_as_main(script.target, script.argv, script.module, fresh_path, tell)
    finally:
        hidden.put_back_all()


def _watch(mode: str, folder: RunFolder) -> None:
    """Look for silent mistakes of the script; what this needs is imported before packages are hidden."""
    if mode in ("warn", "strict") and os.environ.get("WORLD_SIZE") != "1" and "torch" in sys.modules:
        with contextlib.suppress(ImportError, AttributeError):  # a torch without distributed
            from dure.proof import detectors

            detectors.start("strict" if mode == "strict" else "warn", folder)


def read_report(data: bytearray) -> Said | Returned | Failure | None:
    """Take the next thing that a rank sent through its report pipe off `data`; None while it is not all there."""
    if len(data) < _HEADER.size:
        return None
    (length,) = _HEADER.unpack_from(data)
    end = _HEADER.size + length
    if len(data) < end:
        return None
    report: Said | Returned | Failure = pickle.loads(bytes(data[_HEADER.size : end]))
    del data[:end]
    return report


def _call(call: Call, rank: int, report: int) -> int:
    faulthandler.enable()  # a crash in native code leaves the Python stacks in the log
    stacks_on(signal.SIGUSR2, call.folder.stacks(rank))
    heartbeat = Heartbeat(call.folder.heartbeat(rank))
    heartbeat.beat(0, Phase.STARTING)
    if not heartbeat.kept:
        path = call.folder.heartbeat(rank)
        _tell(report, Said(f"{path.parent} cannot be written: a hang will not be noticed", unwatched=True))
    try:
        sys.path[:] = call.search_path
        _limit_threads(call.threads)
        value = _resolve(call.entry)(*pickle.loads(call.args))
        payload = pickle.dumps(value)
    except SystemExit as error:
        if error.code not in (None, 0):
            return _failed(error, call.folder, rank, report)
        payload = pickle.dumps(None)
    except BaseException as error:  # a rank that ends must say why, KeyboardInterrupt too
        return _failed(error, call.folder, rank, report)
    _send(report, Returned(payload))
    last = Heartbeat(call.folder.heartbeat(rank))
    last.beat(0, Phase.DONE)
    last.close()
    return 0


def _failed(error: BaseException, folder: RunFolder, rank: int, report: int) -> int:
    failure = describe(error, rank)
    _send(report, failure)
    trace = traceback_of(error)
    print(trace, file=sys.stderr, flush=True)
    written = {**asdict(failure), "pid": os.getpid(), "type": type(error).__name__, "traceback": trace}
    try:
        write_whole(folder.error(rank), json.dumps(written, indent=2) + "\n")
    except OSError as unwritten:
        print(f"rank {rank}: {folder.error(rank)} could not be written: {unwritten}", file=sys.stderr)
    return 1


def _resolve(entry: str) -> Callable[..., object]:
    module, _, name = entry.partition(":")
    function = getattr(importlib.import_module(module), name, None)
    if not callable(function):
        raise DureError(f"{entry!r} names no function; write package.module:function.")
    resolved: Callable[..., object] = function
    return resolved


def _redirect(request: RankRequest, log: Path, *, again: bool) -> None:
    if request.stdout is not None and request.stderr is not None:
        os.dup2(request.stdout, 1)
        os.dup2(request.stderr, 2)
        for descriptor in {request.stdout, request.stderr}:
            os.close(descriptor)
        return
    descriptor, trouble = open_log(log, goes_on=again)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    if trouble:
        say(trouble, urgent=True)


def stacks_on(number: int, path: Path) -> None:
    """Write the stacks of all threads to `path` when a signal comes, up to the end of the process."""
    try:
        descriptor = open_own(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    except OSError:
        descriptor = None
    faulthandler.register(number, file=sys.stderr if descriptor is None else descriptor, all_threads=True)


def _limit_threads(threads: int) -> None:
    # OMP_NUM_THREADS says it too, to a torch that is yet to be imported.
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)


def _send(report: int, message: Returned | Failure) -> None:
    body = pickle.dumps(message)
    data = memoryview(_HEADER.pack(len(body)) + body)
    while data:
        data = data[os.write(report, data) :]


def _tell(report: int, said: Said) -> None:
    """Tell the launcher, unless it does not listen: a write of so few bytes is whole, and does not wait."""
    body = pickle.dumps(said)
    if select.select([], [report], [], 0)[1]:
        os.write(report, _HEADER.pack(len(body)) + body)


def _leave(code: int) -> NoReturn:
    """End without the interpreter's own teardown: the last word is out, and a native thread may still run."""
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
