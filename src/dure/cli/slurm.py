"""`dure submit`, `dure status`, `dure cancel`: parse, call the room, print."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from dure.cli.options import Json, Settings

JOB_OR_RUN = "A job's number, or a run's folder."


def submit(
    job: Annotated[Path, typer.Argument(help="What to train: a TOML file; [cluster] and [slurm] say where.")],
    ranks: Annotated[int | None, typer.Option(help="Ranks on each node.", show_default="the job's")] = None,
    nodes: Annotated[
        str | None, typer.Option(help="Nodes, or MIN:MAX of them.", show_default="the job's")
    ] = None,
    settings: Settings = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            help="Where the run keeps its files, seen by all nodes; a run that is there already goes on.",
            show_default="{storage}/checkpoints/NAME-JOBID",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the batch script, and do nothing; needs no Slurm."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Submit a job to Slurm: one agent per node; it saves and is queued again when its time or a node is lost.

    The script is queued again at most slurm.requeues times, goes on with the same run, and comes to the same bits.
    """
    from dure.config import load_job, parse_settings
    from dure.engine.slurm.prepare import prepare
    from dure.engine.slurm.script import script
    from dure.engine.slurm.submit import in_words
    from dure.engine.slurm.submit import submit as hand_over

    loaded = load_job(job, parse_settings(settings or []), ranks, nodes)
    request = prepare(loaded, job, settings or [], ranks, run_dir)
    if dry_run:
        text = script(request)
        print(json.dumps({"script": text})) if as_json else sys.stdout.write(text)
        return
    done = hand_over(request)
    print(json.dumps(done.as_json()) if as_json else in_words(done))


def status(
    target: Annotated[
        str | None,
        typer.Argument(metavar="[RUN|JOBID]", help=JOB_OR_RUN, show_default="all jobs of yours in the queue"),
    ] = None,
    as_json: Json = False,
) -> None:
    """How submitted jobs are: their place in Slurm's queue, and how far the run itself is."""
    from dure.engine.slurm.status import all_of_mine, find, in_words, status_of

    found = all_of_mine() if target is None else [status_of(find(target))]
    print(json.dumps({"jobs": [one.as_json() for one in found]}) if as_json else in_words(found))


def cancel(
    target: Annotated[str, typer.Argument(metavar="RUN|JOBID", help=JOB_OR_RUN)],
    now: Annotated[bool, typer.Option("--now", help="At once, without saving.")] = False,
    as_json: Json = False,
) -> None:
    """End a submitted job: it saves after its step, and is not queued again; dure submit --run-dir goes on."""
    from dure.engine.slurm.cancel import cancel as end
    from dure.engine.slurm.cancel import in_words
    from dure.engine.slurm.status import find

    done = end(find(target), now=now)
    print(json.dumps(done.as_json()) if as_json else in_words(done))


def add_to(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (submit, status, cancel):
        app.command()(command)
