"""What synchronisation costs a step: dure against DDP (as it comes, and as an expert sets it up), Accelerate, Fabric.

On each team size all contenders live in the same ranks and are timed in turn, a few steps at a time. A
round's figure is its slowest rank's; the figures are medians over rounds.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from dure.base.errors import UsageError
from dure.base.run_folder import RunFolder
from dure.launch import run_team
from dure.launch.preload import TORCH
from dure.tools.bench.workload import (
    DDP,
    DURE,
    FINER,
    LIBRARIES,
    LIMIT,
    SHARDED,
    TUNED,
    RankFigures,
    Workload,
)

HANG_SECONDS = 120.0
CONTENDERS = (LIMIT, DURE, SHARDED, DDP, TUNED, *LIBRARIES)
SYNC_BARS = {DURE: 1 / 3}
"""At most so much of what synchronisation adds to the expert's DDP."""
LIMIT_BARS = {SHARDED: 0.0}
"""At most so much over the limit, as a part of it: ranks that share an optimizer's work save what all of it takes."""

Figures = dict[str, Any]


def bench_step(
    *, sizes: Sequence[int] = (2, 4), rounds: int = 5, steps: int = 5, load: Workload | None = None
) -> Figures:
    """Time `rounds` rounds of `steps` steps of every contender, on teams of each of `sizes`, and of 1."""
    load = load or Workload()
    _check(sizes, rounds, steps, load)
    installed = [name for name in CONTENDERS if _is_installed(name)]
    alone = _run(1, (FINER, DDP, TUNED), load, rounds, steps)
    teams = {size: _run(size, (*installed, FINER), load, rounds, steps) for size in sizes}
    return {
        "model_parameters": alone[0].parameters,
        "seq": load.seq,
        "global_batch": load.global_batch,
        "rounds": rounds,
        "steps": steps,
        "not_installed": [name for name in CONTENDERS if name not in installed],
        "results": [_result(size, found) for size, found in teams.items()],
        "exactness": [_price(size, load.shards, found) for size, found in {1: alone, **teams}.items()],
    }


def in_words(figures: Figures) -> str:
    """The figures as tables."""
    lines = [
        f"A transformer of {figures['model_parameters'] / 1e6:.1f} M parameters, global batch "
        f"{figures['global_batch']} × {figures['seq']} tokens, AdamW (fused), one thread per rank.",
        f"Medians of {figures['rounds']} interleaved rounds of {figures['steps']} steps.",
    ]
    for name in figures["not_installed"]:
        lines.append(
            f"{name} is not installed: pip install '{LIBRARIES[name].replace('_', '-')}' to have it here."
        )
    for result in figures["results"]:
        lines += ["", *_table(result)]
    lines += ["", *_exactness_table(figures["exactness"])]
    return "\n".join(lines)


def _check(sizes: Sequence[int], rounds: int, steps: int, load: Workload) -> None:
    possible = [size for size in range(2, load.shards + 1) if load.global_batch % size == 0]
    for size in sizes:
        if size not in possible:
            raise UsageError(
                f"a team of {size} cannot be compared: equal parts of {load.global_batch} samples and at most "
                f"{load.shards} ranks are needed; use {', '.join(map(str, possible))}"
            )
    if rounds < 1 or steps < 1:
        raise UsageError(f"{rounds} rounds of {steps} steps measure nothing; use at least one of each")


def _is_installed(name: str) -> bool:
    return name not in LIBRARIES or importlib.util.find_spec(LIBRARIES[name]) is not None


def _run(ranks: int, names: Sequence[str], load: Workload, rounds: int, steps: int) -> list[RankFigures]:
    libraries = [LIBRARIES[name] for name in names if name in LIBRARIES]
    with tempfile.TemporaryDirectory(prefix="dure-bench-step-") as path:
        found = run_team(
            "dure.tools.bench.rounds:run_rank",
            (load, names, ranks, rounds, steps),
            ranks=ranks,
            folder=RunFolder(Path(path)),
            hang_seconds=HANG_SECONDS,
            preload=(*TORCH, *libraries),
        )
    return cast("list[RankFigures]", found)


def _contender(name: str, ranks: Sequence[RankFigures]) -> dict[str, Any] | None:
    """Medians over rounds: the slowest rank's time, and all ranks' CPU-seconds."""
    if name not in ranks[0].seconds:
        return None
    rounds = [max(times) for times in zip(*(rank.seconds[name] for rank in ranks), strict=True)]
    cpu = [sum(times) for times in zip(*(rank.cpu_seconds[name] for rank in ranks), strict=True)]
    return {
        "step_ms": round(statistics.median(rounds) * 1e3, 2),
        "cpu_s": round(statistics.median(cpu), 4),
        "round_ms": [round(seconds * 1e3, 2) for seconds in rounds],
    }


def _result(size: int, ranks: Sequence[RankFigures]) -> Figures:
    contenders = {name: _contender(name, ranks) for name in CONTENDERS}
    present = {name: figures["step_ms"] for name, figures in contenders.items() if figures is not None}
    base = present.pop(LIMIT)
    added = {name: round(step_ms - base, 2) for name, step_ms in present.items()}
    cpu = {name: figures["cpu_s"] for name, figures in contenders.items() if figures is not None}
    added_cpu = {name: round(cpu[name] - cpu[LIMIT], 4) for name in present}
    return {
        "ranks": size,
        "shards": size,
        "contenders": contenders,
        "missing_to_limit": {name: round((step_ms - base) / base, 4) for name, step_ms in present.items()},
        "sync_added_ms": added,
        "bucket_caps_ms": {f"{cap:g}": round(ms, 2) for cap, ms in ranks[0].bucket_caps_ms.items()},
        "sync_of_tuned": {name: _part(added[name], added[TUNED]) for name in present},
        "sync_of_tuned_bars": SYNC_BARS,
        "missing_to_limit_bars": LIMIT_BARS,
        "sync_ratio_to_ddp": _part(added[DURE], added[DDP]),
        # Other processes on the machine stretch times, hardly CPU-seconds: the steadier of the two ratios.
        "sync_added_cpu_s": added_cpu,
        "sync_cpu_of_tuned": {name: _part(added_cpu[name], added_cpu[TUNED]) for name in present},
        "sync_cpu_ratio_to_ddp": _part(added_cpu[DURE], added_cpu[DDP]),
        "weights_off_dure": {name: ranks[0].differences[name] for name in present if name != DURE},
    }


def _part(added: float, of: float) -> float | None:
    """None on a machine too busy to show what the opponent adds."""
    return round(added / of, 3) if of > 0 else None


def _price(size: int, shards: int, ranks: Sequence[RankFigures]) -> Figures:
    found = {name: _contender(name, ranks) for name in (FINER, DDP, TUNED)}
    ours, theirs, tuned = (one for one in found.values() if one is not None)
    return {
        "ranks": size,
        "shards": shards,
        "dure_ms": ours["step_ms"],
        "ddp_ms": theirs["step_ms"],
        "ddp_tuned_ms": tuned["step_ms"],
        "dure_cpu_s": ours["cpu_s"],
        "ddp_cpu_s": theirs["cpu_s"],
        "ddp_tuned_cpu_s": tuned["cpu_s"],
        "price": round((ours["step_ms"] - tuned["step_ms"]) / tuned["step_ms"], 4),
    }


def _table(result: Figures) -> list[str]:
    lines = [
        f"{result['ranks']} ranks, {result['shards']} shards",
        f"  {'':14}{'step ms':>10}{'CPU-s':>10}{'sync adds ms':>15}{'CPU-s':>9}{'of ddp_tuned':>15}{'CPU-s':>8}"
        f"{'over the limit':>17}",
    ]
    for name, figures in result["contenders"].items():
        if figures is None:
            lines.append(f"  {name:14}{'not installed':>20}")
            continue
        line = f"  {name:14}{figures['step_ms']:>10.1f}{figures['cpu_s']:>10.3f}"
        if name != LIMIT:
            line += f"{result['sync_added_ms'][name]:>15.1f}{result['sync_added_cpu_s'][name]:>9.3f}"
            line += (
                f"{_ratio(result['sync_of_tuned'][name]):>15}{_ratio(result['sync_cpu_of_tuned'][name]):>8}"
            )
            line += f"{result['missing_to_limit'][name]:>17.1%}"
            if name in SYNC_BARS:
                line += f"   (bar: ≤ {SYNC_BARS[name]:.2f} of ddp_tuned)"
            if name in LIMIT_BARS:
                line += f"   (bar: ≤ {LIMIT_BARS[name]:.0%} over the limit)"
        lines.append(line)
    caps = ", ".join(f"{cap} MB {ms:.1f} ms" for cap, ms in result["bucket_caps_ms"].items())
    lines.append(
        f"  ddp_tuned: gradient_as_bucket_view, static_graph, and the fastest bucket_cap_mb of {caps}"
    )
    time_ratio, cpu_ratio = result["sync_ratio_to_ddp"], result["sync_cpu_ratio_to_ddp"]
    if time_ratio is None or cpu_ratio is None:
        lines.append("  plain DDP was not slower than the limit: the machine is too busy to compare on")
    else:
        lines.append(
            f"  dure's synchronisation adds {time_ratio:.2f} × the time of default DDP's, {cpu_ratio:.2f} × its CPU"
        )
    return lines


def _ratio(part: float | None) -> str:
    return "?" if part is None else f"{part:.2f}"


def _exactness_table(prices: Sequence[Figures]) -> list[str]:
    lines = [
        f"The price of exactness: {prices[0]['shards']} shards computed one by one, against ddp_tuned, which "
        "computes a rank's whole part at once",
        f"  {'ranks':8}{'dure ms':>10}{'ddp ms':>10}{'ddp_tuned ms':>15}{'dure CPU-s':>13}{'ddp CPU-s':>12}"
        f"{'ddp_tuned CPU-s':>18}{'price':>9}",
    ]
    for price in prices:
        lines.append(
            f"  {price['ranks']:<8}{price['dure_ms']:>10.1f}{price['ddp_ms']:>10.1f}{price['ddp_tuned_ms']:>15.1f}"
            f"{price['dure_cpu_s']:>13.3f}{price['ddp_cpu_s']:>12.3f}{price['ddp_tuned_cpu_s']:>18.3f}"
            f"{price['price']:>+9.1%}"
        )
    return lines
