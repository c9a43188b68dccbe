"""`dure bench load`: pretrained weights into every rank, our three ways beside the ways people load today.

All contenders live in the same ranks and take turns, round by round, on one file that is in the page cache. The clock
starts before the model is built and stops when the last rank holds weights that are its own. Figures are medians
over rounds; the first round warms the machine and is thrown away.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from dure.base.errors import DureError, UsageError
from dure.base.run_folder import RunFolder
from dure.launch import run_team
from dure.tools.bench import s3_server

OURS = ("slices", "every-rank", "rank0")
PEERS = {"load_file": "safetensors", "hf": "transformers"}
"""Contenders of other people, and the package that each needs."""
FLOOR = "floor"
HANG_SECONDS = 120.0
WEIGHTS = "model.safetensors"
_MB = 1_000_000

Storage = Literal["folder", "s3"]
Figures = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """What the ranks of the bench are told."""

    location: str
    """The storage that holds the model's folder, `model`."""
    mb: float
    rounds: int
    contenders: tuple[str, ...]
    throttle: float | None
    """MB/s of the storage, over all ranks."""
    folder: str
    """For files that ranks share or download."""


@dataclass(frozen=True)
class RankFigures:
    """What one rank measured of one contender, a figure a round."""

    seconds: list[float] = field(default_factory=list)
    stages: list[dict[str, float]] = field(default_factory=list)
    requests: list[int | None] = field(default_factory=list)
    read_bytes: list[int | None] = field(default_factory=list)
    peak_extra_bytes: list[int] = field(default_factory=list)
    """Memory at its highest, beyond what was there before and the parameters themselves."""
    fingerprints: list[str] = field(default_factory=list)


def bench_load(
    *,
    ranks: int = 4,
    mb: float = 500.0,
    storage: Storage = "folder",
    rounds: int = 5,
    throttle: float | None = None,
    contenders: tuple[str, ...] | None = None,
) -> Figures:
    """Seconds until `ranks` ranks hold a file of `mb` MB, by contender.

    `throttle` lets the storage give so many MB/s to all ranks together; it is ours that is throttled, so that
    other people's contenders are left out.
    """
    _check(ranks, mb, storage, rounds, throttle)
    wanted = contenders or (OURS if throttle else (*OURS, *PEERS))
    missing = [n for n in wanted if n in PEERS and not importlib.util.find_spec(PEERS[n])]
    chosen = tuple(name for name in wanted if name not in missing)
    with contextlib.ExitStack() as around:
        temporary = around.enter_context(tempfile.TemporaryDirectory(prefix="dure-bench-load-"))
        from dure.tools.bench.load_ranks import write_model

        size = write_model(Path(temporary) / "model", mb)
        location, server = temporary, None
        if storage == "s3":
            server = around.enter_context(s3_server.S3Server())
            around.enter_context(_environment(server.environment()))
            location = _put(server, Path(temporary) / "model")
        task = Task(location, mb, rounds, chosen, throttle, temporary)
        found = _run(task, ranks)
        served = {name: _served(server, task, name, ranks) for name in chosen} if server is not None else {}
    floor = _median_of_slowest([by_name[FLOOR] for by_name in found])
    results = [_row(name, [by_name[name] for by_name in found]) | served.get(name, {}) for name in chosen]
    odd = {print_ for row in results for print_ in row["fingerprints"]}
    if len(odd) > 1:
        raise DureError(f"contenders hold different weights, so their times say nothing: {results}")
    return {
        "ranks": ranks,
        "mb": round(size / _MB, 3),
        "file_bytes": size,
        "storage": storage,
        "rounds": rounds,
        "throttle_mb_s": throttle,
        "floor_seconds": floor,
        "not_installed": missing,
        "results": results,
        "speedup_over_every_rank": _ratio(results, "every-rank", "slices"),
        "slices_over_floor": _over(results, "slices", floor),
        "slices_over_bandwidth": _over(results, "slices", size / _MB / throttle if throttle else None),
    }


def in_words(figures: Figures) -> str:
    """A table."""
    where = f"{figures['mb']:.0f} MB into {figures['ranks']} ranks from a {figures['storage']}"
    if figures["throttle_mb_s"]:
        where += f" of {figures['throttle_mb_s']:g} MB/s"
    lines = [
        f"{where}: medians of {figures['rounds']} interleaved rounds.",
        f"{'':>11} {'seconds':>8} {'× floor':>8} {'requests':>9} {'MB read':>8} {'MB extra':>9}   stages",
        f"{'the floor':>11} {figures['floor_seconds']:>8.3f}",
    ]
    for row in figures["results"]:
        requests = "mapped" if row["storage_requests"] is None else f"{row['storage_requests']:,}"
        read = "mapped" if row["storage_bytes"] is None else f"{row['storage_bytes'] / _MB:,.0f}"
        stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in row["stages"].items())
        times = row["seconds"] / figures["floor_seconds"]
        lines.append(
            f"{row['strategy']:>11} {row['seconds']:>8.3f} {times:>8.2f} {requests:>9} {read:>8} "
            f"{row['peak_extra_bytes'] / _MB:>9.1f}   {stages}"
        )
    if figures["not_installed"]:
        packages = ", ".join(PEERS[name] for name in figures["not_installed"])
        lines.append(f"Not installed, so not measured: {packages}")
    return "\n".join(lines)


def _run(task: Task, ranks: int) -> list[dict[str, RankFigures]]:
    results = run_team(
        "dure.tools.bench.load_ranks:measure",
        (task,),
        ranks=ranks,
        folder=RunFolder(Path(task.folder) / "run"),
        hang_seconds=HANG_SECONDS,
    )
    return cast(list[dict[str, RankFigures]], results)


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Within `with`, these variables are set, here and in the ranks."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _put(server: s3_server.S3Server, folder: Path) -> str:
    from dure.storage import open_store

    location = server.make_bucket("dure-bench")
    store = open_store(location)
    for path in folder.iterdir():
        store.write_whole(f"model/{path.name}", [path.read_bytes()])
    return location


def _served(server: s3_server.S3Server, task: Task, name: str, ranks: int) -> Figures:
    """What the server itself counts for one load, in a run of its own."""
    before = server.served_requests(), server.served_bytes()
    _run(Task(task.location, task.mb, 0, (name,), None, task.folder), ranks)
    return {
        "server_requests": server.served_requests() - before[0],
        "server_bytes": server.served_bytes() - before[1],
    }


def _row(name: str, found: list[RankFigures]) -> Figures:
    slowest = max(range(len(found)), key=lambda rank: statistics.median(found[rank].seconds))
    stages = found[slowest].stages
    return {
        "strategy": name,
        "seconds": _median_of_slowest(found),
        "round_seconds": [
            round(max(of_ranks), 4) for of_ranks in zip(*(r.seconds for r in found), strict=True)
        ],
        "stages": {key: round(statistics.median(s[key] for s in stages), 4) for key in stages[0]},
        "storage_requests": _sum([rank.requests[-1] for rank in found]),
        "storage_bytes": _sum([rank.read_bytes[-1] for rank in found]),
        "peak_extra_bytes": max(max(rank.peak_extra_bytes) for rank in found),
        "fingerprints": sorted({print_ for rank in found for print_ in rank.fingerprints}),
    }


def _median_of_slowest(found: list[RankFigures]) -> float:
    by_round = zip(*(rank.seconds for rank in found), strict=True)
    return round(float(statistics.median(max(seconds) for seconds in by_round)), 4)


def _sum(counts: Sequence[int | None]) -> int | None:
    return None if None in counts else sum(count or 0 for count in counts)


def _seconds(results: list[Figures], name: str) -> float | None:
    return next((row["seconds"] for row in results if row["strategy"] == name), None)


def _ratio(results: list[Figures], slow: str, fast: str) -> float | None:
    one, other = _seconds(results, slow), _seconds(results, fast)
    return round(one / other, 3) if one and other else None


def _over(results: list[Figures], name: str, base: float | None) -> float | None:
    seconds = _seconds(results, name)
    return round(seconds / base, 3) if seconds and base else None


def config_json(settings: dict[str, Any]) -> str:
    """The model's config.json, as transformers wants it."""
    return json.dumps({"architectures": ["BertModel"], "model_type": "bert", "dtype": "float32", **settings})


def _check(ranks: int, mb: float, storage: str, rounds: int, throttle: float | None) -> None:
    if ranks < 1:
        raise UsageError(f"--ranks is {ranks}; use 1 or more")
    if not 4 <= mb <= 20_000:
        raise UsageError(f"--mb is {mb:g}; use 4 to 20000")
    if storage not in ("folder", "s3"):
        raise UsageError(f"--storage is {storage!r}; use folder or s3")
    if rounds < 1:
        raise UsageError(f"--rounds is {rounds}; use 1 or more")
    if throttle is not None and throttle <= 0:
        raise UsageError(f"--throttle is {throttle:g}; use MB/s above 0")
    if not importlib.util.find_spec("safetensors"):
        raise UsageError("the bench writes its file with safetensors; pip install safetensors")
    reason = s3_server.why_not_here() if storage == "s3" else None
    if reason is not None:
        raise UsageError(f"--storage s3: {reason}")
