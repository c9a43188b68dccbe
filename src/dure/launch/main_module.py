"""Run a script or a module as `__main__`, as `python script.py` and `python -m module` would."""

from __future__ import annotations

import importlib.machinery
import os
import runpy
import sys
import types
from collections.abc import Callable, Sequence

from dure.launch.failure import own_frames


def run_as_main(
    target: str,
    argv: Sequence[str],
    module: bool,
    fresh_path: Sequence[str],
    report: Callable[[BaseException], None],
) -> int:
    """Run `target` and return the exit code that an interpreter of its own would have ended with.

    `fresh_path` is that interpreter's `sys.path` without its first entry. What the script raises is
    reported first, then printed as the interpreter prints it.
    """
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:  # the name by which processes that the script spawns call its classes
        sys.modules["__mp_main__"] = main
    switch = ["-m"] if module else []
    sys.orig_argv = [sys.executable, "-u", *switch, target, *argv]
    sys.argv = ["-m" if module else target, *argv]
    first = os.getcwd() if module else os.path.dirname(os.path.realpath(target))
    sys.path[:] = [*([] if sys.flags.safe_path else [first]), *fresh_path]
    try:
        if module:
            # What `python -m` itself calls: the module runs in the real `__main__`, so its classes pickle.
            runpy._run_module_as_main(target)  # type: ignore[attr-defined]
        else:
            _run_file(target, main)
    except SystemExit as stop:
        code = _exit_code(stop)
        if code != 0:
            report(stop)
        return code
    except BaseException as error:
        report(error)
        error.__traceback__ = own_frames(error.__traceback__)
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except SystemExit as stop:  # as the interpreter has it
            return _exit_code(stop)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _run_file(target: str, main: types.ModuleType) -> None:
    if not os.path.isfile(target) or not target.endswith(".py"):
        # A folder or an archive with a __main__ in it, or compiled code.
        runpy.run_path(target, run_name="__main__")
        return
    path = os.path.abspath(target)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__.update(__file__=path, __loader__=loader, __spec__=None, __cached__=None)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code
    print(stop.code, file=sys.stderr)
    return 1
