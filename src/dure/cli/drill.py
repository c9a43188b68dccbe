"""`dure drill`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from dure.base.say import say
from dure.cli.bench import print_figures
from dure.cli.options import Json, Ranks, RunDir, Settings

EPILOG = "Exit codes: 0 all the same bits, 1 a run could not be started, 2 usage, 3 other bits."


def drill(
    job: Annotated[Path, typer.Argument(help="What to train: a TOML file.")],
    faults: Annotated[
        str, typer.Option(help="What is to go wrong, with commas.")
    ] = "kill-rank,kill-all,kill-agent,stop-rank,segfault,corrupt-latest,truncate-latest,disk-full,slow-rank",
    seed: Annotated[int, typer.Option(help="Chooses the steps and the ranks that are disturbed.")] = 0,
    ranks: Ranks = None,
    settings: Settings = None,
    run_dir: RunDir = None,
    as_json: Json = False,
) -> None:
    """Train a job undisturbed, then once for every fault, and compare the bits of the weights.

    Each fault strikes at a random step of the second half. The runs are kept in the run folder.
    """
    from dure.config import load_job, parse_settings
    from dure.tools.drill import drill as room

    loaded = load_job(job, parse_settings(settings or []), ranks)
    folder = (
        run_dir or Path("runs") / f"drill-{loaded.job.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    )
    figures = room.drill(
        job,
        faults,
        folder=folder,
        ranks=loaded.job.team.ranks,
        seed=seed,
        settings=settings or [],
        say=lambda text: say(f"drill: {text}"),
    )
    print_figures(room, figures, as_json)
    if any(fault["same_bits"] is False for fault in figures["faults"]):
        raise typer.Exit(3)
