"""`dure run`: a stock torchrun script on every rank, as torchrun would run it, only sooner."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dure.base.errors import RankFailed, Resumable, UsageError
from dure.base.files import open_own, read_at_most
from dure.base.run_folder import RunFolder
from dure.base.say import say
from dure.comm.topology import RUN_VARIABLE
from dure.launch import preload
from dure.launch.rank import Command, Script
from dure.launch.restart_policy import Restart, UnsavedScript
from dure.launch.spec import LaunchSpec
from dure.launch.team import launch

_LONGEST_SCRIPT = 16 << 20


def run_script(
    target: str,
    argv: Sequence[str],
    spec: LaunchSpec,
    *,
    module: bool,
    cold: bool = False,
) -> int:
    """Run a script, or a module with `module`, on every rank; return 0 when all ranks ended with 0.

    Scripts see what they see under torchrun: environment, argv, `__main__`, working directory, output on
    the console (also kept in `spec.folder.log(rank)`). They run in interpreters that have imported torch, and what else
    the script imports first; with `cold` in fresh ones, for scripts that must set something up before.

    Ctrl-C, SIGTERM, SIGHUP and SIGQUIT are passed on to the ranks, which have `spec.grace_seconds` to end before they
    are killed. So do the others when a rank fails, and so does that rank, for its exit hooks. A script that saves
    (`team.checkpoint`) is asked to stop at a step instead, and has `spec.stop_seconds`.

    A team that failed is started again as `spec.script` and `spec.max_restarts` say.

    Raises RankFailed (exit code 1) with the first cause; its traceback is on the console already. Of a script that has
    saved and stopped, its exit code is 75.
    """
    refuse_missing(target, module)
    env = {**os.environ, RUN_VARIABLE: str(spec.folder.path.absolute())}
    if spec.ranks > 1:
        env.setdefault("OMP_NUM_THREADS", "1")  # torchrun's rule
    switch = ["-m"] if module else []
    work: Script | Command = (
        Command((sys.executable, "-u", *switch, target, *argv))
        if cold
        else Script(target, tuple(argv), module, spec.folder)
    )
    source = "" if cold else _source(target, module)
    try:
        launch(
            replace(
                spec,
                tee=True,
                script=spec.script or unsaved_script(spec.folder, spec.max_restarts),
                ask_to_stop=lambda name: _ask_to_stop(spec.folder, name),
            ),
            work,
            env,
            preload=() if cold else preload.base(source),
            extra=preload.extra(source) if spec.ranks > 1 else (),  # one rank can do it by itself
        )
    except RankFailed as failed:
        code = Resumable.exit_code if failed.exit_code == Resumable.exit_code else 1
        raise RankFailed(replace(failed.failure, details="", exit_code=code)) from None
    finally:
        with contextlib.suppress(OSError):
            spec.folder.stop.unlink(missing_ok=True)
    return 0


def unsaved_script(folder: RunFolder, max_restarts: int) -> UnsavedScript:
    """A script that is started again so often until it saves: it says so in the run's folder."""
    known: list[bool] = []

    def saves() -> bool:
        # Looked at each time: whether a rank that was killed just after it began to save is started again hangs on it.
        with contextlib.suppress(OSError):
            if not known and folder.script.exists():
                known.append(True)
        return bool(known)

    return UnsavedScript(saves, max_restarts)


def say_restart(restart: Restart) -> None:
    """Tell the user that the team starts again, and why."""
    since = " without progress" if restart.step >= 0 else ""
    say(
        f"all ranks start again (restart {restart.without_progress} of {restart.max_restarts}{since}): {restart.cause}"
    )


def _ask_to_stop(folder: RunFolder, signal_name: str) -> None:
    say(f"{signal_name}: stops after this step and saves; once more stops at once")
    os.close(open_own(folder.stop, os.O_WRONLY | os.O_CREAT))


def refuse_missing(target: str, module: bool) -> None:
    """Raise UsageError for a script or a module that is not there."""
    if module:
        name = target.partition(".")[0]
        if _find(name) is None and importlib.util.find_spec(name) is None:
            raise UsageError(f"no module {name!r} is found (from {os.getcwd()}); -m takes a module's name.")
    elif "\0" in target or not os.path.exists(target):
        raise UsageError(f"the script {target!r} does not exist (in {os.getcwd()}).")


def _source(target: str, module: bool) -> str:
    """The text of what runs as `__main__`, as far as it can be read without importing anything."""
    path = _module_file(target) if module else Path(target)
    try:
        # Not what can be read only once, such as the pipe of a shell's <(…).
        if path is None or not path.is_file():
            return ""
        return read_at_most(path, _LONGEST_SCRIPT).decode(errors="replace")
    except (OSError, ValueError):
        return ""


def _module_file(name: str) -> Path | None:
    found = _find(name)
    if found is not None and found.submodule_search_locations is not None:
        found = _find(f"{name}.__main__")
    return Path(found.origin) if found is not None and found.origin else None


def _find(name: str) -> importlib.machinery.ModuleSpec | None:
    """Find a module as `python -m` would, but without importing the packages that it is in."""
    path: Sequence[str] | None = [os.getcwd(), *sys.path]
    found = None
    parts = name.split(".")
    for depth in range(len(parts)):
        found = importlib.machinery.PathFinder.find_spec(".".join(parts[: depth + 1]), path)
        if found is None:
            return None
        path = found.submodule_search_locations
    return found
