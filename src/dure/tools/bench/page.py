"""What the page costs a run, and how quick it is with a long one, measured in a real browser.

cost    the CPU seconds of a run's launcher and ranks: alone, with the page served and asked, with the page open in a
        browser on the same cores, in turns (page_cost.py)
scale   a made-up record of many steps and ranks: seconds to read it once, then first paint, zoom, and server memory
"""

from __future__ import annotations

import gzip
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np

from dure.base.errors import UsageError
from dure.base.files import write_whole
from dure.observe.events import Ended, PartBegun, Proved, TeamFormed, encode
from dure.tools.bench import page_cost
from dure.tools.bench.page_browser import CHROMIUM, browser_page, served

_LINE = 4096
_LINES_IN_PART = 16
_ZOOMS = 8
_READ_SECONDS = 900.0


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    steps: int = 1_000_000
    ranks: int = 8
    rounds: int = 5
    epochs: int = 60


QUICK = Size(steps=200_000, ranks=2, rounds=1, epochs=2)


def bench_page(size: Size, only: Sequence[str]) -> dict[str, object]:
    """Measure; UsageError where there is no browser to measure with."""
    unknown = set(only) - {"cost", "scale"}
    if unknown:
        raise UsageError(f"--only {','.join(unknown)}: the parts are cost and scale")
    if not os.access(CHROMIUM, os.X_OK):
        raise UsageError(
            f"this bench opens the page in {CHROMIUM}, which is not here: apt-get install chromium"
        )
    with tempfile.TemporaryDirectory(prefix="dure-bench-") as folder:
        figures: dict[str, object] = {"cores": os.cpu_count()}
        if "scale" in only:
            figures["scale"] = _scale(Path(folder), size)
        if "cost" in only:
            figures["cost"] = page_cost.measure(Path(folder), size.rounds, size.epochs)
        return figures


def in_words(figures: dict[str, Any]) -> str:
    """For a person."""
    lines = []
    if (scale := figures.get("scale")) is not None:
        lines += [
            f"{scale['steps']:,} steps × {scale['ranks']} ranks, {scale['events_mb']:.0f} MB of events",
            f"  read once       {scale['read_seconds']:.1f} s",
            f"  first paint     {scale['first_paint_ms']:.0f} ms; all charts drawn {scale['drawn_ms']:.0f} ms",
            f"  zoom            {scale['zoom_ms']:.0f} ms (slowest {scale['slowest_zoom_ms']:.0f} ms)",
            f"  server memory   {scale['server_mb']:.0f} MB (most ever {scale['server_peak_mb']:.0f} MB)",
        ]
    if (cost := figures.get("cost")) is not None:
        lines += page_cost.in_words(cost)
    return "\n".join(lines)


def _scale(folder: Path, size: Size) -> dict[str, object]:
    run = folder / "long"
    nbytes = synthetic_run(run, size.steps, size.ranks)
    with served(run) as (url, _):
        began = time.monotonic()
        while _state(url)["reading"] or _state(url)["steps"][1] < size.steps:
            if time.monotonic() > began + _READ_SECONDS:
                raise UsageError(f"the record was not read within {_READ_SECONDS:.0f} s; try fewer --steps")
            time.sleep(0.5)
        read_seconds = time.monotonic() - began
    with served(run) as (url, pid), browser_page() as page:
        _state(url)  # the index is read here; what follows is what a reader sees
        page.goto(f"{url}#now")
        page.wait_for_selector("main[data-drawn-ms] .uplot canvas")
        drawn = float(page.get_attribute("main", "data-drawn-ms"))
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        page.goto("about:blank")
        page.goto(f"{url}#ranks")
        page.wait_for_selector("canvas[data-drawn]")
        zooms = [_zoom(page, "+") for _ in range(_ZOOMS)]
        zooms += [_zoom(page, "ArrowLeft"), _zoom(page, "-"), _zoom(page, "0")]
        return {
            "steps": size.steps,
            "ranks": size.ranks,
            "events_mb": nbytes / 1e6,
            "read_seconds": round(read_seconds, 2),
            "first_paint_ms": round(paint, 1),
            "drawn_ms": round(drawn, 1),
            "zoom_ms": round(statistics.median(zooms), 1),
            "slowest_zoom_ms": round(max(zooms), 1),
            "server_mb": round(_memory(pid, "VmRSS") / 1e6, 1),
            "server_peak_mb": round(_memory(pid, "VmHWM") / 1e6, 1),
        }


def _state(url: str) -> Any:
    with urlopen(f"{url}api/state?since=-", timeout=60) as answer:
        return json.load(answer)


def _zoom(page: Any, key: str) -> float:
    """Press a key over the picture; milliseconds until it is drawn again, told by the page itself."""
    canvas = page.locator("canvas[data-view=ranks]")
    before = canvas.get_attribute("data-drawn")
    canvas.press(key)
    page.wait_for_selector(f"canvas[data-view=ranks]:not([data-drawn='{before}'])")
    return float(canvas.get_attribute("data-ms"))


def _memory(pid: int, name: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    (kib,) = [line.split()[1] for line in status if line.startswith(f"{name}:")]
    return int(kib) * 1024


def synthetic_run(folder: Path, steps: int, ranks: int) -> int:
    """A record of so many steps, as a long run leaves it: in compacted parts. Returns its bytes. One rank in eight
    waits least, by turns."""
    events = folder / "events"
    events.mkdir(parents=True)
    job = {
        "name": "synthetic",
        "team": {"ranks": ranks},
        "data": {"global_batch": 64, "split": "interleaved"},
    }
    write_whole(folder / "job.json", json.dumps({"job": job}))
    nbytes = 0
    for rank in range(ranks):
        nbytes += _synthetic_rank(events, rank, steps, ranks)
    return nbytes


def _synthetic_rank(events: Path, rank: int, steps: int, ranks: int) -> int:
    random = np.random.default_rng(rank)
    team = TeamFormed(
        rank, ranks, max(8, ranks), 1, "cpu", "bench", 1, True, "0" * 64, 27_170, 64 * 1000, steps
    )
    lines, number, at, part, nbytes = [encode(team, 0.0, 0)], 1, 0.0, 0, 0
    for first in range(0, steps, _LINE):
        count = min(_LINE, steps - first)
        line, taken = _synthetic_line(random, rank, ranks, first, count, number, at)
        lines.append(line)
        number, at = number + count, at + taken
        if len(lines) >= _LINES_IN_PART:
            nbytes += _write_part(events, rank, part, lines)
            part, lines = part + 1, []
    nbytes += _write_part(events, rank, part, lines) if lines else 0
    tail = encode(PartBegun(part + 1, 0, steps, 0, 0), at, number)
    tail += encode(Proved(steps - 1, "0" * 16, agree=True), at, number)
    tail += encode(Ended(steps, "0" * 16, "0" * 64), at, number + 1)
    write_whole(events / f"rank-{rank}.jsonl", tail)
    return nbytes + len(tail)


def _synthetic_line(
    random: np.random.Generator, rank: int, ranks: int, first: int, count: int, number: int, at: float
) -> tuple[str, float]:
    places = np.arange(first, first + count)
    slow = (places // 50_000) % ranks == rank
    compute = 30_000 + random.integers(0, 2000, count) + 8000 * slow
    wait = np.where(slow, random.integers(10, 90, count), 8000 + random.integers(0, 900, count))
    exchange = wait + 2000
    after = 45_000 + random.integers(0, 3000, count)
    line = {
        "v": 2,
        "kind": "steps",
        "i": number,
        "at": round(at, 6),
        "n": count,
        "step": first,
        "epoch": first // 1000,
        "samples": 64 // ranks,
        "of": 64,
        "lr": 0.001,
        "norm": None,
        "loss": np.round(2 / (1 + places / 20_000) + random.random(count) * 0.2, 6).tolist(),
        "after": after.tolist(),
        "seconds": {
            "save": 0,
            "data": random.integers(80, 900, count).tolist(),
            "compute": compute.tolist(),
            "exchange": exchange.tolist(),
            "wait": wait.tolist(),
            "update": random.integers(600, 900, count).tolist(),
        },
    }
    return json.dumps(line, separators=(",", ":")) + "\n", float(after.sum()) / 1e6


def _write_part(events: Path, rank: int, part: int, lines: Sequence[str]) -> int:
    content = gzip.compress("".join(lines).encode(), 1, mtime=0)
    (events / f"rank-{rank}.{part:04d}.jsonl.gz").write_bytes(content)
    return len(content)
