"""The price of exactness: V shards computed one by one, against what cannot be avoided, V plain passes of that size.

Five models, from one whose passes are long to one whose passes are nothing but calls. Compared are CPU seconds of all
ranks, which other work on the machine stretches less than time.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dure.base.errors import UsageError
from dure.base.run_folder import RunFolder
from dure.launch import run_team

MODELS = ("cnn", "transformer", "mlp", "gru", "tiny")
PASSES, DURE, WHOLE, DDP = "passes", "dure", "whole", "ddp"
BAR = 1.10
HANG_SECONDS = 300.0

Figures = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    rounds: int = 9
    seconds: float = 0.5
    """Of a contender in a round, about."""
    shards: int = 8


QUICK = Size(rounds=1, seconds=0.01)


@dataclass(frozen=True)
class RankFigures:
    """What one rank measured: CPU seconds of a step, one entry a round, by contender."""

    parameters: int
    cpu_seconds: dict[str, list[float]]


def bench_exactness(
    *, sizes: Sequence[int] = (1, 2, 4), models: Sequence[str] = MODELS, size: Size | None = None
) -> Figures:
    """Measure every model on teams of each of `sizes`."""
    size = size or Size()
    unknown = [name for name in models if name not in MODELS]
    if unknown:
        raise UsageError(f"there is no model {unknown[0]!r} in this bench; use {', '.join(MODELS)}")
    possible = [ranks for ranks in range(1, size.shards + 1) if size.shards % ranks == 0]
    wrong = [ranks for ranks in sizes if ranks not in possible]
    if wrong:
        raise UsageError(
            f"{wrong[0]} ranks cannot be compared: each must have as many of {size.shards} shards; use "
            f"{', '.join(map(str, possible))}"
        )
    found = {ranks: _run(ranks, models, size) for ranks in sizes}
    results = [
        _result(name, ranks, [rank[name] for rank in of_ranks])
        for name in models
        for ranks, of_ranks in found.items()
    ]
    return {
        "shards": size.shards,
        "rounds": size.rounds,
        "bar": BAR,
        "results": results,
        "within_bar": all(one["within_bar"] for one in results),
    }


def in_words(figures: Figures) -> str:
    """The figures as a table."""
    lines = [
        f"CPU milliseconds of one step, all ranks together; {figures['shards']} shards, medians of "
        f"{figures['rounds']} interleaved rounds.",
        "passes: as many plain passes of a shard's size and an update, without any exchange; ddp: the same in DDP,",
        "which exchanges in the last one; whole: one pass over a rank's samples. Ratios are medians of rounds' own.",
        f"Bar: dure at most {figures['bar']:.2f} × passes.",
        "",
        f"  {'model':13}{'ranks':>6}{'passes':>10}{'ddp':>10}{'dure':>10}{'whole':>10}{'of passes':>12}"
        f"{'of ddp':>9}{'of whole':>10}",
    ]
    for one in figures["results"]:
        cpu = one["cpu_ms"]
        ddp = f"{cpu[DDP]:>10.3f}" if DDP in cpu else f"{'-':>10}"
        of_ddp = f"{one['of_ddp']:>9.2f}" if "of_ddp" in one else f"{'-':>9}"
        lines.append(
            f"  {one['model']:13}{one['ranks']:>6}{cpu[PASSES]:>10.3f}{ddp}{cpu[DURE]:>10.3f}{cpu[WHOLE]:>10.3f}"
            f"{one['of_passes']:>12.2f}{of_ddp}{one['of_whole']:>10.2f}  "
            + ("within the bar" if one["within_bar"] else "MISSED")
        )
    return "\n".join(lines)


def _run(ranks: int, models: Sequence[str], size: Size) -> list[dict[str, RankFigures]]:
    with tempfile.TemporaryDirectory(prefix="dure-bench-exactness-") as path:
        found = run_team(
            "dure.tools.bench.exactness_ranks:run_rank",
            (tuple(models), ranks, size),
            ranks=ranks,
            folder=RunFolder(Path(path)),
            hang_seconds=HANG_SECONDS,
        )
    return cast("list[dict[str, RankFigures]]", found)


def _result(model: str, ranks: int, figures: Sequence[RankFigures]) -> Figures:
    """Of all ranks together."""
    rounds = {
        name: [sum(times) for times in zip(*(rank.cpu_seconds[name] for rank in figures), strict=True)]
        for name in figures[0].cpu_seconds
    }

    def ratio(name: str) -> float:
        # Within a round, so that what else the machine did meanwhile weighs on both.
        pairs = zip(rounds[DURE], rounds[name], strict=True)
        return float(round(statistics.median(ours / theirs for ours, theirs in pairs), 4))

    return {
        "model": model,
        "ranks": ranks,
        "parameters": figures[0].parameters,
        "cpu_ms": {name: round(statistics.median(times) * 1e3, 4) for name, times in rounds.items()},
        **{f"of_{name}": ratio(name) for name in rounds if name != DURE},
        "within_bar": ratio(PASSES) <= BAR,
    }
