"""`dure demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dure.base.say import say
from dure.cli.options import Json, Lang, Page, RunDir


def demo(
    ranks: Annotated[int, typer.Option(help="Processes that train together.")] = 4,
    storage: Annotated[Path, typer.Option(help="The shared-storage folder to draw the photos into.")] = Path(
        "shared"
    ),
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Only lay out the storage, with the same job for two nodes.")
    ] = False,
    run_dir: RunDir = None,
    page: Page = False,
    as_json: Json = False,
    lang: Lang = None,
) -> None:
    """Draw 400 photos of cats and of things that are not, train a small CNN on 4 ranks, show what happened."""
    from dure.engine.run_job import Start, run_job
    from dure.tools.demo import prepare, prepare_cluster

    if cluster:
        print(prepare_cluster(storage))
        return
    run_job(prepare(storage, ranks), Start(run_dir, page=page), None, as_json=as_json, lang=lang)
    where = "" if run_dir is None else f" {run_dir}"
    if not as_json:
        say(f"see it in the browser: dure page{where}; while it trains: dure demo --page")
        say("how it works, in eleven chapters: dure lesson")
