"""`dure selftest`."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from dure.base.say import say
from dure.cli.options import Json

EPILOG = "Exit codes: 0 all that could be tried is right, 1 something is wrong, 2 usage."


def selftest(
    ranks: Annotated[
        int | None,
        typer.Option(min=1, max=8, help="The largest team.", show_default="a rank per device, else 3"),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Json = False,
) -> None:
    """Try on this node all that dure promises: the same bits on 1 … N devices, exchanges, loads, checkpoints, a kill.

    It takes a minute or two, and leaves nothing. The object that --json prints says on what it ran: send it, if you
    have a kind of device that the README does not name.
    """
    import json

    from dure.base.errors import UsageError
    from dure.base.language import chosen_language
    from dure.config.sections import DeviceName
    from dure.tools.selftest.report import text_of
    from dure.tools.selftest.run import self_test

    if device not in get_args(DeviceName):
        raise UsageError(f"--device is {device!r}; use auto, cpu or cuda")
    report = self_test(device=device, ranks=ranks, say=lambda text: say(f"selftest: {text}"))
    typer.echo(
        json.dumps(report.to_plain(), ensure_ascii=False)
        if as_json
        else text_of(report, chosen_language(None))
    )
    if report.verdict == "fail":
        raise typer.Exit(1)
