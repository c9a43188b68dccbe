"""`dure run`: a stock torchrun script on every rank, as torchrun would run it, only sooner."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dure.errors import RankFailed, UsageError
from dure.files import read_at_most
from dure.launch.rank import Command, Script
from dure.launch.team import TORCH, TORCH_WITH_DDP, launch
from dure.run_folder import RunFolder

if TYPE_CHECKING:
    from dure.launch.nodes.join import Joined
    from dure.launch.nodes.messages import Team


_LONGEST_SCRIPT = 16 << 20


def run_script(
    target: str,
    argv: list[str],
    *,
    module: bool,
    ranks: int,
    folder: RunFolder,
    cold: bool = False,
    port: int = 0,
    grace_seconds: float = 1.0,
    joined: Joined | None = None,
    on_team: Callable[[Team], None] = lambda team: None,
) -> int:
    """Run a script, or a module with `module`, on every rank; return 0 when all ranks ended with 0.

    Scripts see what they see under torchrun: environment, argv, `__main__`, working directory, output on
    the console (also kept in `folder.log(rank)`). They run in interpreters that have imported torch; with
    `cold` in fresh ones, for scripts that must set something up before torch is imported.

    With `joined`, these are one node's ranks of several nodes'; `on_team` is told which they are.

    Raises RankFailed (exit code 1) with the first cause; its traceback is on the console already.
    """
    _must_exist(target, module)
    env = dict(os.environ)
    if ranks > 1:
        env.setdefault("OMP_NUM_THREADS", "1")  # torchrun's rule
    switch = ["-m"] if module else []

    def work(rank: int) -> Script | Command:
        if cold:
            return Command((sys.executable, "-u", *switch, target, *argv))
        return Script(target, tuple(argv), module)

    try:
        launch(
            work,
            ranks=ranks,
            folder=folder,
            env=env,
            preload=() if cold else _preload(target, module),
            search_path=None,
            hang_seconds=math.inf,  # a stock script has no pulse
            port=port,
            on_tick=None,
            tee=True,
            grace_seconds=grace_seconds,
            joined=joined,
            on_team=on_team,
        )
    except RankFailed as failed:
        raise RankFailed(str(failed), rank=failed.rank, host=failed.host, exit_code=1) from None
    return 0


def _must_exist(target: str, module: bool) -> None:
    if module or os.path.isfile(target) or os.path.isdir(target):  # a folder may have a __main__.py
        return
    if "\0" not in target and os.path.exists(target):
        raise UsageError(f"the script {target!r} is no plain file but a pipe, a socket or a device.")
    raise UsageError(f"the script {target!r} does not exist (in {os.getcwd()}).")


def _preload(target: str, module: bool) -> tuple[str, ...]:
    """Choose what to import before the fork: what DDP needs takes a second, for a script that names it."""
    try:
        path = _module_file(target) if module else Path(target)
        text = read_at_most(path, _LONGEST_SCRIPT).decode(errors="replace") if path is not None else ""
    except (OSError, ValueError):
        text = ""
    return TORCH_WITH_DDP if "DistributedDataParallel" in text or "import dure" in text else TORCH


def _module_file(name: str) -> Path | None:
    # Only a top-level name is looked up: finding a submodule would import its package here.
    found = None if "." in name else importlib.util.find_spec(name)
    return Path(found.origin) if found is not None and found.origin else None
