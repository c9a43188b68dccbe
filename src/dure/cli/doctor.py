"""`dure doctor`. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

doctor = typer.Typer()


@doctor.command(
    "doctor",
    epilog="Exit codes: 0 nothing is wrong, 1 Slurm gave no nodes, 2 usage, 4 something is wrong, on the nodes that "
    "are named, 130 stopped.",
)
def examine(
    job: Annotated[
        Path | None,
        typer.Argument(help="The job to be trained; without one, what every job needs.", show_default="none"),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            help="The nodes, with commas, the leader first; reached by ssh.",
            show_default="the job's, or here",
        ),
    ] = None,
    slurm: Annotated[
        bool | None,
        typer.Option(
            "--slurm/--no-slurm",
            help="Have Slurm give the nodes, as dure submit does: those of the allocation that this is in, else some "
            "for the time of the look.",
            show_default="for a job with [slurm] and without hosts",
        ),
    ] = None,
    wait: Annotated[int, typer.Option(min=1, help="How many seconds Slurm may take to give them.")] = 60,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value; beats the job file. Repeat it.")
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            help="Where the run will keep its files; needed where the storage is a bucket.",
            show_default="in the storage's checkpoints/, on one machine in runs/",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(help="Where the leader will listen.", show_default="29400; on Slurm the job's own"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object.")] = False,
    lang: Annotated[str | None, typer.Option(help="en or ko.", show_default="by the locale")] = None,
    serve: Annotated[bool, typer.Option("--serve", hidden=True)] = False,
    serve_inside: Annotated[bool, typer.Option("--serve-inside", hidden=True)] = False,
) -> None:
    """Look for what would go wrong on the nodes, before anything is started on them.

    Versions, files, storage both ways (a folder or a bucket), what must refuse writes and what must take them, space,
    shared memory, limits, names, interfaces, every pair of nodes. Nothing is changed, nothing is left, and nodes that
    Slurm gave are given back.
    """
    if serve:
        from dure.doctor.node import serve as answer

        answer()
        return
    if serve_inside:
        from dure.doctor.inside import serve_inside as answer_inside

        raise typer.Exit(answer_inside())
    from dure.engine.preflight import Asked, run_doctor

    asked = Asked(job, hosts, tuple(settings or ()), run_dir, slurm, wait, port)
    run_doctor(asked, as_json=as_json, lang=lang)
