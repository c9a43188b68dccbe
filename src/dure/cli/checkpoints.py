"""`dure checkpoints` and `dure export`: what a run has saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dure.cli.options import Json


def checkpoints(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    verify: Annotated[bool, typer.Option(help="Read every byte and compare hashes.")] = True,
    as_json: Json = False,
) -> None:
    """List a run's checkpoints, newest first: step, time, size, verified or why not."""
    from dure.base.run_folder import RunFolder
    from dure.checkpoint.export import as_rows, in_words

    rows = as_rows(RunFolder(run.absolute()), verify=verify)
    print(json.dumps({"checkpoints": rows}) if as_json else in_words(rows))


def export(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    out: Annotated[Path, typer.Argument(help="The file to write, such as model.safetensors.")],
    step: Annotated[int | None, typer.Option(help="Of which step.", show_default="the newest")] = None,
    average: Annotated[
        bool, typer.Option("--average", help="The moving average of the weights (train.ema).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a checkpoint's weights alone, as plain safetensors with the model's own names."""
    from dure.base.run_folder import RunFolder
    from dure.checkpoint.export import export_weights

    made = export_weights(RunFolder(run.absolute()), out, step, average=average)
    print(json.dumps(made) if as_json else f"{out}: {made['tensors']} tensors of step {made['step']}")
