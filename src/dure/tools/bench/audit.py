"""What a shadow shard costs: a model trained with every step audited and with none, in turn, in the same ranks."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any, cast

from dure.base.run_folder import RunFolder
from dure.launch import run_team
from dure.launch.preload import TORCH_WITH_DDP
from dure.tools.bench.paired import Figures, more_in, of_all_ranks
from dure.tools.bench.workload import Workload

WORKLOAD = Workload()
SHARE = 0.01


def bench_audit(
    *, ranks: int = 3, rounds: int = 15, steps: int = 3, load: Workload = WORKLOAD
) -> dict[str, object]:
    """CPU-seconds of a step on all ranks together, medians over `rounds` rounds of `steps` steps of either kind."""
    with tempfile.TemporaryDirectory(prefix="dure-bench-audit-") as name:
        found = cast(
            list[dict[str, Any]],
            run_team(
                "dure.tools.bench.audit_ranks:measure",
                (load, rounds, steps),
                ranks=ranks,
                folder=RunFolder(Path(name) / "run"),
                preload=TORCH_WITH_DDP,
            ),
        )
    figures: list[Figures] = [rank["figures"] for rank in found]
    without = statistics.median(of_all_ranks(figures, "without"))
    more = more_in(figures, "with", "without")
    return {
        "ranks": ranks,
        "shards": load.shards,
        "rounds": rounds,
        "steps": steps,
        "parameters": found[0]["parameters"],
        "audited": sum(rank["audited"] for rank in found),
        "without_cpu_seconds": round(without, 5),
        "audited_cpu_seconds": round(without + more, 5),
        # A step is so many shards, and the update, and the exchange.
        "shards_more": round(more / (without / load.shards), 2),
        "percent_at_share": round(100 * SHARE * more / without, 3),
    }


def in_words(figures: dict[str, Any]) -> str:
    """A few lines."""
    return (
        f"A transformer of {figures['parameters'] / 1e6:.1f} M parameters, {figures['shards']} shards on "
        f"{figures['ranks']} ranks, medians of {figures['rounds']} interleaved rounds of {figures['steps']} steps.\n"
        f"  no step audited    {figures['without_cpu_seconds']:.4f} CPU-seconds per step, all ranks together\n"
        f"  every step         {figures['audited_cpu_seconds']:.4f}: {figures['shards_more']:.2f} of a step's "
        f"{figures['shards']} parts more\n"
        f"  train.audit = {SHARE} {figures['percent_at_share']:.3f} % of a run's CPU-seconds"
    )
