"""What was found, for programs and for people."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dure.base.language import Language
from dure.doctor.examine import Examination
from dure.doctor.finding import Finding
from dure.doctor.words import HEADINGS, TITLES, fix_of, value_of

if TYPE_CHECKING:
    from rich.table import Table

_LOG_WIDTH = 120
_MOST_IN_MATRIX = 16
_SIGNS = {"ok": "✓", "bad": "✗", "info": "·"}
_STYLES = {"ok": "green", "bad": "bold red", "info": "dim"}


def as_object(found: Examination, language: Language) -> dict[str, Any]:
    """All that was found, for programs."""
    return {
        "ok": not found.bad_nodes,
        "nodes": list(found.nodes),
        "bad_nodes": list(found.bad_nodes),
        "findings": [
            {
                "check": finding.check,
                "node": finding.node,
                "level": finding.level,
                "problem": finding.words,
                "value": value_of(finding, language),
                "fix": fix_of(finding, language),
            }
            for finding in found.findings
        ],
        "pairs": list(found.pairs),
    }


def show(found: Examination, language: Language) -> None:
    """Print what was found, check by check, with what to do about it; then the speed between nodes."""
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else _width())
    console.print(_table(found, language))
    measured = [pair for pair in found.pairs if "reason" not in pair]
    if measured and len(found.nodes) <= _MOST_IN_MATRIX:
        console.print(_matrix(found.nodes, measured, language))


def _table(found: Examination, language: Language) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    title = TITLES[language]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    fixes = any(fix_of(finding, language) for finding in found.findings)
    for column in ("check", "nodes", "found", *(("fix",) if fixes else ())):
        table.add_column(title[column], overflow="fold")
    for check, heading in HEADINGS[language].items():
        groups = _alike([one for one in found.findings if one.check == check], language)
        for place, (nodes, finding) in enumerate(groups):
            who = title["all"] if len(nodes) == len(found.nodes) > 1 else ", ".join(nodes)
            style = _STYLES[finding.level]
            row = [
                Text(heading if place == 0 else ""),
                Text(f"{_SIGNS[finding.level]} {who}", style=style),
                Text(value_of(finding, language), style=style if finding.level == "bad" else ""),
                Text(fix_of(finding, language)),
            ]
            table.add_row(*row[: len(table.columns)])
    return table


def _alike(findings: Sequence[Finding], language: Language) -> list[tuple[list[str], Finding]]:
    """Findings that say the same of several nodes, together."""
    groups: dict[tuple[str, str, str], tuple[list[str], Finding]] = {}
    for finding in findings:
        key = (finding.level, value_of(finding, language), fix_of(finding, language))
        groups.setdefault(key, ([], finding))[0].append(finding.node)
    return list(groups.values())


def _matrix(nodes: Sequence[str], measured: Sequence[dict[str, Any]], language: Language) -> Table:
    from rich import box
    from rich.table import Table

    speeds = {
        (
            pair["from"],
            pair["to"],
        ): f"{pair['bytes_per_second'] * 8e-9:.2f} Gbit/s {pair['seconds'] * 1e6:.0f} µs"
        for pair in measured
    }
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(TITLES[language]["matrix"])
    for node in nodes:
        table.add_column(node, justify="right")
    for sender in nodes:
        table.add_row(sender, *(speeds.get((sender, node), "–" if sender == node else "✗") for node in nodes))
    return table


def _width() -> int:
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdigit() else _LOG_WIDTH
