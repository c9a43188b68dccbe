"""`dure page` and `dure report`: see a run. Start without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dure.cli.options import Json, Lang

PAGE_EPILOG = (
    "Examples: dure page (the newest of runs/); dure page runs/cats-20260101-120000-1; dure train job.toml --page. "
    "Exports: /metrics, /export/steps.csv, /export/trace.json, /export/tensorboard under the page's address."
)


def page(
    run: Annotated[
        Path | None,
        typer.Argument(help="A run's folder, or a folder of runs.", show_default="the newest of runs/"),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            help="The address to listen on; any but this machine's own needs the token that is printed."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(help="0: any free one.", show_default="8642, or a free one")
    ] = None,
    opens: Annotated[bool, typer.Option("--open/--no-open", help="Show it in the browser.")] = True,
    with_parent: Annotated[int | None, typer.Option("--with-parent", hidden=True)] = None,
    as_json: Json = False,
) -> None:
    """Show a run in the browser, live or finished: progress, ranks × time, samples, proofs, comparisons.

    Reads the run's folder alone; training never waits for it. --json prints the address as one object.
    """
    from dure.page.serve import show

    opens = opens and with_parent is None
    show(run, host, port, opens=opens, as_json=as_json, parent=with_parent)


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="A run's folder; more to compare them.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The file to write.")] = Path("report.html"),
    pdf: Annotated[bool, typer.Option("--pdf", help="Beside it, a PDF; takes Chromium.")] = False,
    as_json: Json = False,
    lang: Lang = None,
) -> None:
    """Write a run as one HTML file to send: the page's views, without a server and without a network."""
    from dure.base.language import chosen_language
    from dure.page.report import write_report

    made = write_report(runs, out, chosen_language(lang), pdf=pdf)
    print(
        json.dumps(made) if as_json else "\n".join(f"{path}: {size:,} bytes" for path, size in made.items())
    )
