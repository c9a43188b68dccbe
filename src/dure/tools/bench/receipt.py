"""What a receipt costs a step, in CPU-seconds: a model trained with one and without, in turn, in the same ranks.

And the same calls alone, counted: the difference of two steps is small beside what a busy machine adds to either.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any, cast

from dure.base.run_folder import RunFolder
from dure.config.sections import Train
from dure.launch import run_team
from dure.launch.preload import TORCH_WITH_DDP
from dure.tools.bench.paired import more_in, of_all_ranks
from dure.tools.bench.workload import Workload

WORKLOAD = Workload()
EVERY = int(Train.model_fields["receipt_every"].default)
"""Steps between two roots, as by default."""


def bench_receipt(
    *, ranks: int = 2, rounds: int = 15, steps: int = 3, load: Workload = WORKLOAD
) -> dict[str, object]:
    """CPU-seconds of a step on all ranks together, medians over `rounds` rounds of `steps` steps of either kind."""
    with tempfile.TemporaryDirectory(prefix="dure-bench-receipt-") as name:
        folder = RunFolder(Path(name) / "run")
        found = cast(
            list[dict[str, Any]],
            run_team(
                "dure.tools.bench.receipt_ranks:measure",
                (load, rounds, steps, str(folder.path)),
                ranks=ranks,
                folder=folder,
                preload=TORCH_WITH_DDP,
            ),
        )
    figures = [rank["figures"] for rank in found]
    without = statistics.median(of_all_ranks(figures, "without"))
    more = more_in(figures, "with", "without")
    root = max(rank["root_cpu_seconds"] for rank in found) / EVERY
    parts = {name: sum(rank["counted"][name] for rank in found) for name in found[0]["counted"]}
    parts["root"] = root
    return {
        "ranks": ranks,
        "rounds": rounds,
        "steps": steps,
        "parameters": found[0]["parameters"],
        "without_cpu_seconds": round(without, 5),
        "with_cpu_seconds": round(without + more + root, 5),
        "overhead_percent": round(100 * (more + root) / without, 2),
        "counted_cpu_seconds": {name: round(value, 7) for name, value in parts.items()},
        "counted_percent": round(100 * sum(parts.values()) / without, 2),
        "bytes_per_step": found[0]["bytes_per_step"],
    }


def in_words(figures: dict[str, Any]) -> str:
    """A few lines."""
    counted = " + ".join(
        f"{name} {value * 1e6:.0f}" for name, value in figures["counted_cpu_seconds"].items()
    )
    return (
        f"A transformer of {figures['parameters'] / 1e6:.1f} M parameters on {figures['ranks']} ranks, medians of "
        f"{figures['rounds']} interleaved rounds of {figures['steps']} steps.\n"
        f"  without a receipt  {figures['without_cpu_seconds']:.4f} CPU-seconds per step, all ranks together\n"
        f"  with one           {figures['with_cpu_seconds']:.4f}, with a root every {EVERY} steps: "
        f"{figures['overhead_percent']:+.2f} %\n"
        f"  counted            {figures['counted_percent']:.2f} %: {counted} µs, the same calls alone\n"
        f"  size               {figures['bytes_per_step']:.0f} bytes per step"
    )
