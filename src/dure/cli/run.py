"""`dure run`: a stock script on N ranks, with torchrun's command line as far as it goes."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from dure.backend import BACKEND_VARIABLE, NAME
from dure.base.errors import UsageError
from dure.base.say import say
from dure.cli.options import Leader, NodeRank, Port, RunDir, TeamKeyFile

MAX_RESTARTS = 3
"""Of a script that saves, as of a job."""


class Arithmetic(StrEnum):
    """Which bits a script's ranks compute."""

    NATIVE = "native"
    PORTABLE = "portable"


class Watch(StrEnum):
    """What becomes of a script's silent mistakes."""

    WARN = "warn"
    STRICT = "strict"
    OFF = "off"


class ScriptCommand(TyperCommand):
    """A command whose own options come before SCRIPT; what comes after it is the script's own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, after the arguments were put in that order."""
        ctx.allow_interspersed_args = False
        takes_value = {
            name: not getattr(option, "is_flag", False)
            for option in self.params
            if option.param_type_name == "option"
            for name in option.opts
        }
        return super().parse_args(ctx, own_options_first(args, takes_value))


def own_options_first(args: Sequence[str], takes_value: Mapping[str, bool]) -> list[str]:
    """Return `[OPTION …] -- SCRIPT [ARGUMENT …]`; `takes_value` has all of the command's own options.

    As under torchrun, what follows SCRIPT is the script's. Two older forms are understood too: options between SCRIPT
    and a `--`, if there is nothing else between them; and, where no option stands before SCRIPT, those right after it.
    """
    first = _own(args, takes_value)
    script = first + 1 if args[first : first + 1] == ["--"] else first
    own, rest = list(args[:first]), list(args[script + 1 :])
    if script >= len(args) or (script == first and args[script].startswith("-")):
        return list(args)  # there is no SCRIPT, or an option that nobody knows
    # Not -m: SCRIPT would mean something else.
    after = {name: value for name, value in takes_value.items() if name != "-m"}
    end = _own(rest, after)
    if rest[end : end + 1] == ["--"]:
        own, rest = [*own, *rest[:end]], rest[end + 1 :]
    elif not own:
        own, rest = rest[:end], rest[end:]
    return [*own, "--", args[script], *rest]


def _own(args: Sequence[str], takes_value: Mapping[str, bool]) -> int:
    """How many of the first arguments are options of our own, and their values."""
    at = 0
    while at < len(args):
        name, equals, _ = args[at].partition("=")
        if name not in takes_value:
            break
        at += 2 if takes_value[name] and not equals else 1
    return min(at, len(args))


def ranks_wanted(text: str) -> int:
    """The number that `--ranks` asks for: a number, or auto (the accelerators, else the cores), gpu or cpu."""
    if text in ("auto", "gpu"):
        import torch

        found = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
        if found or text == "gpu":
            if not found:
                raise UsageError(
                    "--ranks is gpu, but torch finds no accelerator here; use auto, cpu or a number"
                )
            return found
    if text in ("auto", "cpu"):
        return len(os.sched_getaffinity(0))
    try:
        ranks = int(text)
    except ValueError:
        raise UsageError(f"--ranks is {text!r}; use a number, auto, gpu or cpu") from None
    if ranks < 1:
        raise UsageError(f"--ranks is {ranks}; use 1 or more")
    return ranks


def run(
    target: Annotated[str, typer.Argument(metavar="SCRIPT", help="A script, or with -m a module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's own, options too.")
    ] = None,
    ranks: Annotated[
        str,
        typer.Option(
            "--ranks",
            "--nproc-per-node",
            "--nproc_per_node",
            help="Processes to start: a number, or auto for one an accelerator, else one a core.",
        ),
    ] = "2",
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module.")] = False,
    arithmetic: Annotated[
        Arithmetic,
        typer.Option(
            help="portable: kernels with the same bits on x86-64 CPUs with AVX2 of all vendors; slower."
        ),
    ] = Arithmetic.NATIVE,
    cold: Annotated[
        bool, typer.Option("--cold", help="New interpreters, for scripts that set things up before torch.")
    ] = False,
    grace: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="How long ranks may take to end after Ctrl-C, SIGTERM or another rank's failure.",
        ),
    ] = 30.0,
    nodes: Annotated[
        int,
        typer.Option("--nodes", "--nnodes", help="Machines that run it together, each with so many ranks."),
    ] = 1,
    node_rank: NodeRank = None,
    leader: Leader = None,
    team_key: TeamKeyFile = None,
    run_dir: RunDir = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin anew; an earlier run in the folder is moved aside.")
    ] = False,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            "--max-restarts",
            "--max_restarts",
            min=0,
            max=1_000_000,
            metavar="N",
            help="How often a team that failed is started again: a script with team.checkpoint when its machine failed "
            "it, as often as it gets no further; any other script after whatever failure, as under torchrun.",
            show_default="3 with team.checkpoint, else 0",
        ),
    ] = None,
    hang_seconds: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            metavar="SECONDS",
            help="When all ranks beat (team.step, dure.heartbeat) and none moves for so long, the team has failed: who "
            "waits for whom, and all stacks, are told.",
            show_default="never",
        ),
    ] = None,
    stop_seconds: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="How long a script with team.checkpoint may take to finish its step and save when asked to stop.",
        ),
    ] = 100.0,
    port: Port = 0,
    backend: Annotated[
        str | None,
        typer.Option(
            help="dure: process groups that the script makes with gloo are dure's, faster on one node.",
            show_default="as the script says",
        ),
    ] = None,
    watch: Annotated[
        Watch,
        typer.Option(
            help="Silent mistakes of stock DDP scripts (set_epoch forgotten, gradients not synchronised, …): "
            "told in a line, "
            "an error, or not looked for."
        ),
    ] = Watch.WARN,
    standalone: Annotated[bool, typer.Option("--standalone", hidden=True)] = False,
) -> None:
    """Run a script on N ranks, as torchrun --nproc_per_node=N does; torch is imported only once.

    What comes after SCRIPT is the script's own. Ctrl-C and SIGTERM reach the ranks as they are; a second one ends them
    at once. A script with team.checkpoint finishes its step, saves and ends with 75 instead; the same command with
    --run-dir goes on, on any number of ranks. When a rank of it dies, all start again from the last state.
    """
    from dure.base.portable import launch_environment
    from dure.engine.new_run import named_by_time, new_run
    from dure.engine.nodes import nodes_of_script, run_script_on_nodes
    from dure.launch.rank import WATCH_VARIABLE
    from dure.launch.script import refuse_missing, run_script, say_restart, unsaved_script
    from dure.launch.spec import LaunchSpec

    # All that can be refused is, before there is a folder of this run.
    if backend not in (None, NAME):
        raise UsageError(f"--backend is {backend!r}; use {NAME}, or leave it out for the script's own")
    if backend is not None:
        os.environ[BACKEND_VARIABLE] = (
            backend  # ranks have this process's environment, and their children too
        )
    os.environ[WATCH_VARIABLE] = watch.value
    refuse_missing(target, module)
    count = ranks_wanted(ranks)
    several = nodes > 1 or node_rank is not None or leader is not None
    here = nodes_of_script(target, nodes, node_rank, leader, count) if several else None
    name = Path(target).stem
    with new_run(run_dir or _writable(named_by_time(name)), name, fresh=fresh) as folder:
        spec = LaunchSpec(
            ranks=count,
            folder=folder,
            environment=launch_environment(arithmetic),
            port=port,
            grace_seconds=grace,
            max_restarts=MAX_RESTARTS if max_restarts is None else max_restarts,
            script=unsaved_script(folder, max_restarts or 0),
            hang_seconds=math.inf if hang_seconds is None else hang_seconds,
            stop_seconds=stop_seconds,
            stop_setting="--stop-seconds",
            on_restart=say_restart,
        )
        if here is not None:
            from dure.launch.nodes.key_by_hand import key_by_hand, key_file

            file = key_file(team_key)
            key = key_by_hand(file, leads=here.leads, nodes=nodes, seconds=here.join_seconds, say=say)
            code = run_script_on_nodes(
                target, arguments or [], folder, here, key, module=module, cold=cold, spec=spec
            )
        else:
            code = run_script(target, arguments or [], spec, module=module, cold=cold)
    raise typer.Exit(code)


def _writable(path: Path) -> Path:
    """Return `path`, or another place for the logs if it cannot be made: a script needs no folder to run."""
    if _can_make(path):
        return path
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dure"
    elsewhere = (
        cache / path if _can_make(cache / path) else Path(tempfile.mkdtemp(prefix="dure-")) / path.name
    )
    say(f"{Path.cwd()} cannot be written to; the run's logs are in {elsewhere}")
    return elsewhere


def _can_make(path: Path) -> bool:
    """Whether a folder can be made: by making it, as permissions do not tell all."""
    made = [place for place in (path, *path.parents) if not place.exists()]
    try:
        path.mkdir(parents=True)
    except OSError:
        return False
    finally:
        for place in made:
            with contextlib.suppress(OSError):
                place.rmdir()
    return True
