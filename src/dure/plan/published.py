"""Published tables of training speed, and how far the planner's predictions are from them.

The rule, the same for every table: one row is the anchor, and gives the seconds of one rank's computation; all
others are predicted from it and from figures of the hardware. Rows of one node are predicted from the table's first
row; rows of several nodes from the largest row of one node. Of all-reduces alone, either no row is fitted, or
latency and bandwidth are those of the smallest and the largest size on the same ranks, as `dure plan` measures its
links. No row that is predicted is ever fitted.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from dure.config.section import Section
from dure.plan.links import Link, Links, Shape, all_reduce_seconds
from dure.plan.step import BUCKET_BYTES, Team, Work, step_phases, with_step

FOLDER = Path(__file__).parent / "tables"
JITTER = 0.02
"""Of a rank's step: an assumption, the same for all tables; see `by_jitter`."""

Unit = Literal["samples/s", "seconds/step", "hours", "efficiency", "samples/s/rank", "microseconds"]


class Row(Section):
    """One published figure."""

    nodes: int
    ranks: int
    """On each node."""
    value: float
    cores: int = 1
    """That compute, of those the table names; fewer where some are given to the exchange."""
    mib: float = 0.0
    """Of an all-reduce alone."""


class Hardware(Section):
    """Of the machines of a table; from data sheets and the tuning tables of NCCL, not from the table."""

    inside_gb_per_second: float
    inside_hop_us: float
    network_gb_per_second: float = 1.0
    network_hop_us: float = 0.0
    call_us: float
    figures_from: str


class Asked(Section):
    """What a rank's step asks for."""

    samples: int = 1
    """In a step, of each rank."""
    gradient_mb: float = 0.0
    profile: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    """When gradients are ready: parts of the backward pass with their parts of the bytes; see `profile_from`."""
    profile_from: str = ""
    bucket_mib: float = BUCKET_BYTES / 2**20
    layers: int = 0
    gathered_mb: float = 0.0


class Table(Section):
    """A published table."""

    name: str
    source: str
    unit: Unit
    about: str = ""
    required: bool
    """Whether it is one of those that were named beforehand; the others were added to have more rows."""
    fit_sizes: bool = False
    """Of all-reduces: whether latency and bandwidth come from two sizes instead of from `hardware`."""
    hardware: Hardware
    asked: Asked
    rows: Annotated[tuple[Row, ...], Field(min_length=2)]


@dataclass(frozen=True)
class Predicted:
    """One row beside what the planner says."""

    table: str
    required: bool
    unit: Unit
    row: Row
    predicted: float

    @property
    def error(self) -> float:
        """Of the published figure, as a part of it; more than 0: too high."""
        return self.predicted / self.row.value - 1.0


def tables() -> list[Table]:
    """All that come with dure."""
    return [
        Table.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
        for path in sorted(FOLDER.glob("*.toml"))
    ]


def predict_table(table: Table, jitter: float = JITTER) -> list[Predicted]:
    """Every row but the anchors."""
    found = []
    for row in table.rows:
        if table.unit == "microseconds":
            value = _of_sizes(table, row) if table.fit_sizes else _of_hardware(table, row)
        else:
            anchor = _anchor(table, row)
            value = None if anchor is row else _predicted(table, row, anchor, jitter)
        if value is not None:
            found.append(Predicted(table.name, table.required, table.unit, row, value))
    return found


def mean_error(rows: Sequence[Predicted]) -> float:
    """Of absolute errors; 0 without rows."""
    return sum(abs(row.error) for row in rows) / len(rows) if rows else 0.0


def by_jitter(jitters: Sequence[float] = (0.0, 0.01, 0.02, 0.03, 0.04)) -> dict[float, tuple[float, float]]:
    """Mean errors on one node and on several if ranks' steps varied so much: what the one assumption is worth."""
    found = {}
    for jitter in jitters:
        rows = [row for table in tables() for row in predict_table(table, jitter) if table.required]
        one = [row for row in rows if row.row.nodes == 1]
        found[jitter] = mean_error(one), mean_error([row for row in rows if row.row.nodes > 1])
    return found


def _of_hardware(table: Table, row: Row) -> float:
    seconds = all_reduce_seconds(row.mib * 2**20, Shape(row.nodes, row.ranks), _links(table), "ring")
    return seconds * 1e6


def _of_sizes(table: Table, row: Row) -> float | None:
    """From the smallest and the largest size on as many ranks; None for those two."""
    alike = sorted((one for one in table.rows if one.ranks == row.ranks), key=lambda one: one.mib)
    least, most = alike[0], alike[-1]
    if row in (least, most):
        return None
    each = (most.value - least.value) / (most.mib - least.mib)
    return least.value + each * (row.mib - least.mib)


def _anchor(table: Table, row: Row) -> Row:
    """The row that this one is predicted from."""
    alone = [one for one in table.rows if one.nodes == 1]
    if row.nodes == 1 or not alone:
        return table.rows[0]
    return max(alone, key=lambda one: one.ranks)


def _predicted(table: Table, row: Row, anchor: Row, jitter: float) -> float:
    samples = table.asked.samples
    of_anchor = _seconds(table.unit, anchor, samples)
    work = with_step(_work(table, anchor), _team(table, anchor, jitter), of_anchor)
    work = replace(
        work, shards=row.nodes * row.ranks, shard_seconds=work.shard_seconds * anchor.cores / row.cores
    )
    found = step_phases(work, _team(table, row, jitter)).step
    if table.unit == "hours":  # the same samples, shared out between the ranks
        return anchor.value * found / of_anchor * anchor.nodes * anchor.ranks / (row.nodes * row.ranks)
    if table.unit == "efficiency":
        return of_anchor / found
    return {
        "samples/s": row.nodes * row.ranks * samples / found,
        "samples/s/rank": samples / found,
        "seconds/step": found,
    }[table.unit]


def _seconds(unit: Unit, row: Row, samples: int) -> float:
    """Of one step, where the unit says it; hours say no step's seconds but through `samples` of the whole job."""
    ranks = row.nodes * row.ranks
    if unit == "samples/s":
        return ranks * samples / row.value
    if unit == "samples/s/rank":
        return samples / row.value
    if unit == "hours":
        return row.value * 3600 * ranks / samples  # samples: steps of one rank alone
    return row.value


def _work(table: Table, row: Row) -> Work:
    asked = table.asked
    return Work(
        shards=row.nodes * row.ranks,
        shard_seconds=0.0,
        gradient_bytes=asked.gradient_mb * 1e6,
        profile=asked.profile,
        bucket_bytes=asked.bucket_mib * 2**20,
        layers=asked.layers,
        gathered_bytes=asked.gathered_mb * 1e6,
    )


def _team(table: Table, row: Row, jitter: float) -> Team:
    return Team(Shape(row.nodes, row.ranks), _links(table), "ring", jitter=jitter)


def _links(table: Table) -> Links:
    hardware = table.hardware
    return Links(
        Link(hardware.inside_gb_per_second * 1e9, hardware.inside_hop_us * 1e-6),
        Link(hardware.network_gb_per_second * 1e9, hardware.network_hop_us * 1e-6),
        hardware.call_us * 1e-6,
    )
