"""`dure doctor`. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

doctor = typer.Typer()


@doctor.command(
    "doctor", epilog="Exit codes: 0 nothing is wrong, 2 usage, 4 something is, on the nodes that are named."
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
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value; beats the job file. Repeat it.")
    ] = None,
    port: Annotated[int, typer.Option(help="Where the leader will listen.")] = 29400,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object.")] = False,
    lang: Annotated[str | None, typer.Option(help="en or ko.", show_default="by the locale")] = None,
    serve: Annotated[bool, typer.Option("--serve", hidden=True)] = False,
    serve_inside: Annotated[bool, typer.Option("--serve-inside", hidden=True)] = False,
) -> None:
    """Look for what would go wrong on the nodes, before anything is started on them.

    Versions, files, storage both ways, what must refuse writes and what must take them, space, shared memory, limits,
    names, interfaces, every pair of nodes. Nothing is changed, nothing is left.
    """
    if serve:
        from dure.doctor.node import serve as answer

        answer()
        return
    if serve_inside:
        from dure.doctor.inside import serve_inside as answer_inside

        raise typer.Exit(answer_inside())
    from dure.doctor.report import run_doctor

    run_doctor(job, hosts, settings or [], port=port, as_json=as_json, lang=lang)
