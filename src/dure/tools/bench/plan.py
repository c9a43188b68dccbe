"""The planner against what was measured: published tables, and this machine."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from dure.config import load_job
from dure.plan.links import Shape
from dure.plan.outlook import Told, assume
from dure.plan.published import Predicted, by_jitter, mean_error, predict_table, tables
from dure.plan.step import step_phases
from dure.tools.bench.plan_job import job_text
from dure.tools.bench.workload import Workload

RANKS = (1, 2, 4)


def bench_plan(*, here: bool = False, rounds: int = 5) -> dict[str, Any]:
    """Every published row beside its prediction; with `here`, the step bench's model on this machine too."""
    rows = [row for table in tables() for row in predict_table(table)]
    named = [row for row in rows if row.required]
    figures: dict[str, Any] = {
        "rows": [_row(row) for row in rows],
        "mean_error": {
            "named": _means(named),
            "named_without_all_reduces": _means([row for row in named if row.unit != "microseconds"]),
            "others": _means([row for row in rows if not row.required and row.unit != "microseconds"]),
        },
        "mean_error_by_jitter": {
            str(jitter): {"one_node": round(one, 4), "several_nodes": round(several, 4)}
            for jitter, (one, several) in by_jitter().items()
        },
    }
    if here:
        figures["here"] = _here(rounds)
    return figures


def in_words(figures: dict[str, Any]) -> str:
    """A line per row; then the means."""
    lines = [f"  {'table':55}{'nodes':>6}{'ranks':>6}{'MiB':>6}{'published':>12}{'planner':>12}{'error':>9}"]
    for row in figures["rows"]:
        mark = "*" if row["named"] else " "
        lines.append(
            f"{mark} {row['table']:55}{row['nodes']:>6}{row['ranks']:>6}{row['mib'] or '':>6}{row['published']:>12.5g}"
            f"{row['predicted']:>12.5g}{row['error']:>+9.1%}"
        )
    lines += [
        "",
        "* named beforehand. Anchors (each table's first row, and its largest of one node) are left out.",
    ]
    for name, means in figures["mean_error"].items():
        lines.append(
            f"mean error, {name.replace('_', ' ')}: one node {means['one_node']:.1%} of {means['one_node_rows']} rows, "
            f"several nodes {means['several_nodes']:.1%} of {means['several_nodes_rows']} rows"
        )
    told = ", ".join(
        f"{float(jitter):.0%}: {means['one_node']:.1%} and {means['several_nodes']:.1%}"
        for jitter, means in figures["mean_error_by_jitter"].items()
    )
    lines.append(f"the same for the named if ranks' steps varied by {told}")
    for row in figures.get("here", ()):
        lines.append(
            f"here, {row['ranks']} rank(s): predicted {row['predicted_ms']:.1f} ms, dure bench step "
            f"{row['measured_ms']:.1f} ms, {row['error']:+.1%}"
        )
    return "\n".join(lines)


def _row(row: Predicted) -> dict[str, Any]:
    return {
        "table": row.table,
        "named": row.required,
        "unit": row.unit,
        "nodes": row.row.nodes,
        "ranks": row.row.ranks,
        "mib": row.row.mib,
        "published": row.row.value,
        "predicted": row.predicted,
        "error": round(row.error, 4),
    }


def _means(rows: list[Predicted]) -> dict[str, Any]:
    one = [row for row in rows if row.row.nodes == 1]
    several = [row for row in rows if row.row.nodes > 1]
    return {
        "one_node": round(mean_error(one), 4),
        "one_node_rows": len(one),
        "several_nodes": round(mean_error(several), 4),
        "several_nodes_rows": len(several),
    }


def _here(rounds: int) -> list[dict[str, Any]]:
    """Measure as `dure plan` does (one rank, crowded cores, an all-reduce), predict, then run the step bench."""
    from dure.engine.measure import measure
    from dure.tools.bench.step import bench_step

    load = Workload()
    with tempfile.TemporaryDirectory(prefix="dure-bench-plan-") as folder:
        path = Path(folder) / "job.toml"
        path.write_text(job_text(load), encoding="utf-8")
        loaded = load_job(path, {})
        measured = measure(loaded)
    assumed = assume(loaded.job, measured, None, Told())
    work = replace(assumed.work, data_seconds=0.0)  # the step bench makes its batches before the clock runs
    predicted = {}
    for ranks in RANKS:
        overlap = min(1.0, max(0.0, (measured.cores - ranks) / ranks))
        team = replace(assumed.team, shape=Shape(1, ranks), overlap=overlap)
        predicted[ranks] = step_phases(work, team).step * 1e3
    figures = bench_step(sizes=[ranks for ranks in RANKS if ranks > 1], rounds=rounds, load=load)
    found = {row["ranks"]: row["dure_ms"] for row in figures["exactness"]}
    return [
        {
            "ranks": ranks,
            "predicted_ms": round(predicted[ranks], 2),
            "measured_ms": found[ranks],
            "error": round(predicted[ranks] / found[ranks] - 1, 4),
        }
        for ranks in RANKS
    ]
