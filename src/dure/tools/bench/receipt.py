"""What a receipt costs a step, in CPU-seconds: a model trained with one and without, in turn, in the same ranks."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any, cast

from dure.base.run_folder import RunFolder
from dure.config.sections import Train
from dure.launch import run_team
from dure.launch.preload import TORCH_WITH_DDP
from dure.tools.bench.workload import Workload

EVERY = int(Train.model_fields["receipt_every"].default)
"""Steps between two roots, as by default."""


def bench_receipt(*, ranks: int = 2, rounds: int = 7, steps: int = 5) -> dict[str, object]:
    """CPU-seconds of a step on all ranks together, medians over `rounds` rounds of `steps` steps of either kind."""
    load = Workload()
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
    totals = {
        kind: [sum(rank["cpu_seconds"][kind][at] for rank in found) for at in range(rounds)]
        for kind in ("without", "with")
    }
    without, with_receipt = (statistics.median(totals[kind]) for kind in ("without", "with"))
    ratios = [one / other - 1 for one, other in zip(totals["with"], totals["without"], strict=True)]
    root = max(rank["root_cpu_seconds"] for rank in found) / EVERY
    return {
        "ranks": ranks,
        "rounds": rounds,
        "steps": steps,
        "parameters": found[0]["parameters"],
        "without_cpu_seconds": round(without, 5),
        "with_cpu_seconds": round(with_receipt + root, 5),
        "root_cpu_seconds_per_step": round(root, 6),
        # Of a round's two halves, which share whatever else the machine did meanwhile.
        "overhead_percent": round(100 * (statistics.median(ratios) + root / without), 2),
        "bytes_per_step": found[0]["bytes_per_step"],
    }


def in_words(figures: dict[str, Any]) -> str:
    """A few lines."""
    return (
        f"A transformer of {figures['parameters'] / 1e6:.1f} M parameters on {figures['ranks']} ranks, medians of "
        f"{figures['rounds']} interleaved rounds of {figures['steps']} steps.\n"
        f"  without a receipt  {figures['without_cpu_seconds']:.4f} CPU-seconds per step, all ranks together\n"
        f"  with one           {figures['with_cpu_seconds']:.4f}, of which "
        f"{figures['root_cpu_seconds_per_step']:.5f} for a root every {EVERY} steps\n"
        f"  overhead           {figures['overhead_percent']:.2f} %\n"
        f"  size               {figures['bytes_per_step']:.0f} bytes per step"
    )
