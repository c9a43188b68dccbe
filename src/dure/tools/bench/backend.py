"""`dure bench backend`: what a stock DDP script gains by one word, against Gloo in the same run.

All contenders live in the same ranks and are timed in turn. A round's figure is its slowest rank's; the figures are
medians over rounds. What synchronisation adds is a step's time less that of a step without any.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from dure.base.errors import UsageError
from dure.base.run_folder import RunFolder
from dure.launch import run_team
from dure.launch.preload import TORCH_WITH_DDP
from dure.tools.bench import reduce
from dure.tools.bench.workload import ATTACHED, BACKEND, DDP, DURE, LIMIT, STATIC, RankFigures, Workload

HANG_SECONDS = 120.0
CONTENDERS = {
    LIMIT: "no synchronisation",
    DDP: "DDP, gloo",
    STATIC: "DDP, gloo, static",
    BACKEND: "DDP, dure",
    ATTACHED: "DDP, dure.attach",
    DURE: "team",
}
SYNC_BARS = {BACKEND: 1 / 2, ATTACHED: 1 / 3}
"""At most so much of what Gloo's synchronisation adds."""
REDUCE_BARS = {0.0625: 10.0, 1.0: 5.0, 25.0: 5.0, 100.0: 5.0}
"""By MiB: at least so many times as fast as Gloo."""

Figures = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    rounds: int = 7
    steps: int = 5
    mib: Sequence[float] = tuple(REDUCE_BARS)
    load: Workload = field(default_factory=Workload)


QUICK = Size(
    1,
    2,
    (0.0625, 1.0),
    Workload(width=40, layers=1, heads=2, vocabulary=64, seq=8, global_batch=8, batches=2),
)


def bench_backend(*, ranks: int = 4, size: Size | None = None) -> Figures:
    """Steps of every contender, and all-reduces alone."""
    size = size or Size()
    if ranks < 2 or size.load.global_batch % ranks or ranks > size.load.shards:
        raise UsageError(
            f"--ranks is {ranks}; use 2, 4 or 8: equal parts of {size.load.global_batch} samples"
        )
    if size.rounds < 1 or size.steps < 1:
        raise UsageError(
            f"{size.rounds} rounds of {size.steps} steps measure nothing; use at least one of each"
        )
    steps = _run("rounds:run_rank", (size.load, tuple(CONTENDERS), ranks, size.rounds, size.steps), ranks)
    reduces = _run("backend_ranks:measure", (list(size.mib), size.rounds), ranks)
    measured = cast("list[RankFigures]", steps)
    return {
        "ranks": ranks,
        "model_parameters": measured[0].parameters,
        "rounds": size.rounds,
        "steps": size.steps,
        "contenders": _steps(measured),
        "all_reduce": [_reduce(cast("list[reduce.RankFigures]", reduces), mib) for mib in size.mib],
    }


def in_words(figures: Figures) -> str:
    """The figures as tables, with the bars beside them."""
    lines = [
        f"A transformer of {figures['model_parameters'] / 1e6:.1f} M parameters on {figures['ranks']} ranks, one "
        "thread each, AdamW (fused).",
        f"Medians of {figures['rounds']} interleaved rounds of {figures['steps']} steps.",
        f"  {'':20}{'step ms':>10}{'CPU-s':>10}{'sync adds ms':>15}{'of gloo':>10}{'bar':>9}",
    ]
    for name, one in figures["contenders"].items():
        line = f"  {CONTENDERS[name]:20}{one['step_ms']:>10.1f}{one['cpu_s']:>10.3f}"
        if name != LIMIT:
            ratio = one["sync_of_gloo"]
            line += f"{one['sync_adds_ms']:>15.1f}" + (
                f"{ratio:>10.2f}" if ratio is not None else f"{'?':>10}"
            )
        if name in SYNC_BARS:
            line += f"   ≤ {SYNC_BARS[name]:.2f}"
        lines.append(line)
    lines += ["", "all_reduce alone", f"  {'MiB':>8}{'gloo ms':>12}{'dure ms':>12}{'times':>9}{'bar':>9}"]
    for row in figures["all_reduce"]:
        bar = f"   ≥ {row['bar']:.0f}" if row["bar"] is not None else ""
        lines.append(
            f"  {row['mib']:>8g}{row['gloo_ms']:>12.3f}{row['dure_ms']:>12.3f}{row['times_gloo']:>9.1f}{bar}"
        )
    return "\n".join(lines)


def _run(entry: str, args: tuple[object, ...], ranks: int) -> list[object]:
    with tempfile.TemporaryDirectory(prefix="dure-bench-backend-") as path:
        return run_team(
            f"dure.tools.bench.{entry}",
            args,
            ranks=ranks,
            folder=RunFolder(Path(path)),
            hang_seconds=HANG_SECONDS,
            preload=TORCH_WITH_DDP,
        )


def _steps(ranks: Sequence[RankFigures]) -> dict[str, Figures]:
    found: dict[str, Figures] = {}
    for name in CONTENDERS:
        rounds = [max(times) for times in zip(*(rank.seconds[name] for rank in ranks), strict=True)]
        cpu = [sum(times) for times in zip(*(rank.cpu_seconds[name] for rank in ranks), strict=True)]
        found[name] = {
            "step_ms": round(statistics.median(rounds) * 1e3, 2),
            "cpu_s": round(statistics.median(cpu), 4),
            "round_ms": [round(seconds * 1e3, 2) for seconds in rounds],
        }
    added = {name: round(one["step_ms"] - found[LIMIT]["step_ms"], 2) for name, one in found.items()}
    for name, one in found.items():
        if name != LIMIT:
            one["sync_adds_ms"] = added[name]
            one["sync_adds_cpu_s"] = round(one["cpu_s"] - found[LIMIT]["cpu_s"], 4)
            # Of a machine too busy to show what Gloo's synchronisation costs, nothing can be said.
            one["sync_of_gloo"] = round(added[name] / added[DDP], 3) if added[DDP] > 0 else None
            one["bar"] = SYNC_BARS.get(name)
    return found


def _reduce(ranks: Sequence[reduce.RankFigures], mib: float) -> Figures:
    row: Figures = {"mib": mib}
    for name in ("gloo", "dure"):
        rounds = [max(times) for times in zip(*(rank.seconds[name][mib] for rank in ranks), strict=True)]
        row[f"{name}_ms"] = round(statistics.median(rounds) * 1e3, 4)
    row["times_gloo"] = round(row["gloo_ms"] / row["dure_ms"], 2)
    row["bar"] = REDUCE_BARS.get(mib)
    return row
