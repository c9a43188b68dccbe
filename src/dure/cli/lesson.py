"""`dure lesson`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dure.cli.options import Json, Lang


def lesson(
    host: Annotated[
        str,
        typer.Option(help="The address to serve it on; others than this machine's get a token in the URL."),
    ] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help="Its port.", show_default="8642, or a free one")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE.html",
            help="Write the lesson as one file instead: recordings in place of runs, no server, no network.",
            show_default="none",
        ),
    ] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
    as_json: Json = False,
    lang: Lang = None,
) -> None:
    """Data-parallel training in eleven chapters, in Korean and English, drawn from runs on this machine.

    Each chapter has one thing to change, and most have a button that really starts ranks.
    """
    from dure.base.language import chosen_language
    from dure.tools.lesson.show import serve_lesson, write_file

    language = chosen_language(lang)
    if out is not None:
        write_file(out, language)
        print(out)
        return
    serve_lesson(host, port, language, opens=not no_open and not as_json, as_json=as_json)
