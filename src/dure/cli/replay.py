"""`dure replay` and `dure diff`: whether a run can be had again, and where two runs part."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dure.base.errors import ReceiptWrong, UsageError
from dure.cli.options import Json

REPLAY_EPILOG = (
    "Example: dure replay runs/cats --steps 40:60    (20 steps of a run on 8 ranks, on this one core)"
)


def replay(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    steps: Annotated[
        str | None, typer.Option(metavar="A:B", help="From step A up to B, without B.", show_default="all")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="On how many; any number gives the same bits.")] = 1,
    spot: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="N random steps instead, for an auditor.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compute steps of a run again, from the checkpoint before them, and compare every record of its receipt.

    Ends with 0 and "the same", or with 3 and the first step, shard or state that differs. A machine that computes other
    bits than the run's is refused before it starts, by the names of the operations.
    """
    from dure.engine.replay import in_words, replay_spots
    from dure.engine.replay import replay as replayed

    if spot is not None and steps is not None:
        raise UsageError("give --steps or --spot, one of them")
    first, end = _span(steps)
    done = replay_spots(run, spot, ranks) if spot is not None else [replayed(run, first, end, ranks)]
    if as_json:
        same = not any(one.difference for one in done)
        print(json.dumps({"same": same, "replays": [one.as_json() for one in done]}))
    else:
        print("\n".join(in_words(done)))
    if any(one.difference for one in done):
        raise typer.Exit(ReceiptWrong.exit_code)


def diff(
    one: Annotated[Path, typer.Argument(metavar="RUN1", help="A run's folder, or a copy of its `receipt`.")],
    other: Annotated[Path, typer.Argument(metavar="RUN2", help="Another.")],
    replays: Annotated[
        bool,
        typer.Option(
            "--replay/--no-replay",
            help="Compute parts again where the receipts do not tell the step or the tensor.",
        ),
    ] = True,
    ranks: Annotated[int, typer.Option(min=1, help="On how many ranks to compute.")] = 1,
    as_json: Json = False,
) -> None:
    """The first difference between two runs: a line of the recipe, samples, a shard's loss or gradients, tensors.

    Compares their receipts, which are verified first; where they say too little, both runs are computed again up to
    states in between, each from the checkpoint before it (a binary search: at most 2 log2(steps) replays). Ends with 3
    when the runs differ, and says which one is not what its recipe gives.
    """
    from dure.engine.diff import diff as found_by
    from dure.proof.compare_receipts import in_words

    found = found_by(one, other, ranks=ranks, replays=replays)
    print(json.dumps({"same": found.same, **asdict(found)}) if as_json else "\n".join(in_words(found)))
    if not found.same:
        raise typer.Exit(ReceiptWrong.exit_code)


def _span(text: str | None) -> tuple[int, int | None]:
    if text is None:
        return 0, None
    first, colon, end = text.partition(":")
    if not colon or not all(part == "" or part.isdecimal() for part in (first, end)):
        raise UsageError(f"--steps {text}: write A:B, such as --steps 40:60")
    return int(first or 0), int(end) if end else None
