"""What the page costs a run: CPU seconds of its launcher and ranks, one and the same run in turns

alone     nobody looks
served    `dure page` serves the run, and is asked for what a browser asks for, as often: the cost of the page itself
open      the page is open in Chromium, which takes its share of the same cores: what a reader on the same machine costs

Of the page and the browser, no CPU seconds are counted as the run's; what they used is told beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

from dure.base.errors import UsageError
from dure.base.files import write_whole
from dure.tools.bench.page_browser import browser_page, served

WAYS = ("alone", "served", "open")
_LOOK_SECONDS, _IDLE_SECONDS, _REST = 1.0, 5.0, 15
"""As in app.js: a look, and the rest after one that took long."""
_BINS = 1170
"""What the picture of ranks has room for, in the window that the browser opens here."""
_COLUMNS = "save,data,compute,exchange,update,wait,span"


@dataclass
class Measured:
    """One run."""

    seconds: float
    """CPU seconds of launcher and ranks."""
    asked: int = 0
    """Requests of the browser, or of what stands for it."""
    server_seconds: float = 0.0
    browser_seconds: float = 0.0
    paths: list[str] = field(default_factory=list)
    """What was asked for, in order, without what changes from one request to the next."""


def measure(folder: Path, rounds: int, epochs: int) -> dict[str, object]:
    """Medians over rounds; in each round every way runs once, in an order that is drawn."""
    from dure.tools.demo import prepare

    prepare(folder / "shared", 2)
    found: dict[str, list[Measured]] = {way: [] for way in WAYS}
    for number in range(rounds + (rounds > 1)):  # the first one warms up
        for way in random.sample(WAYS, len(WAYS)):
            measured = _train(folder, epochs, way)
            if number or rounds == 1:
                found[way].append(measured)
    return {"rounds": rounds, "steps": epochs * 10, **{way: _told(found, way) for way in WAYS}}


def _told(found: dict[str, list[Measured]], way: str) -> dict[str, object]:
    """Compared round by round: what else the machine does changes from round to round."""
    percents = [
        100 * (one.seconds / alone.seconds - 1) for one, alone in zip(found[way], found["alone"], strict=True)
    ]
    return {
        "seconds": round(statistics.median(one.seconds for one in found[way]), 3),
        "percent": round(statistics.median(percents), 2),
        "percent_from": round(min(percents), 2),
        "percent_to": round(max(percents), 2),
        "requests": round(statistics.median(one.asked for one in found[way])),
        "server_seconds": round(statistics.median(one.server_seconds for one in found[way]), 3),
        "browser_seconds": round(statistics.median(one.browser_seconds for one in found[way]), 3),
    }


def in_words(cost: dict[str, Any]) -> list[str]:
    """For a person."""
    lines = [
        f"CPU seconds of a run of {cost['steps']} steps, medians of {cost['rounds']} rounds in turns",
        f"  alone           {cost['alone']['seconds']:.2f}",
    ]
    for way, name in (("served", "page served   "), ("open", "in a browser  ")):
        one = cost[way]
        span = (
            f"{one['percent']:+.2f} %, of the rounds {one['percent_from']:+.2f} to {one['percent_to']:+.2f}"
        )
        used = f"server {one['server_seconds']:.2f} s"
        if way == "open":
            used += f", browser {one['browser_seconds']:.2f} s on the same cores"
        lines.append(f"  {name}  {one['seconds']:.2f}  ({span}; {one['requests']} requests, {used})")
    return lines


def _train(folder: Path, epochs: int, way: str) -> Measured:
    run = folder / f"run-{time.monotonic_ns()}"
    job = folder / "cats.toml"
    text = (Path(__file__).parents[1] / "demo" / "cats.toml").read_text()
    write_whole(job, text.replace("../shared", str(folder / "shared")))
    command = [sys.executable, "-m", "dure", "train", str(job), "--ranks=2", f"--run-dir={run}", "--json"]
    command += [f"--set=train.epochs={epochs}", "--set=data.workers=0"]
    measured = Measured(0.0)
    with contextlib.ExitStack() as held:
        # A browser that is there already, as a reader's is: its start is not the page's.
        page = held.enter_context(browser_page()) if way == "open" else None
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if way != "alone":
            while not (run / "events" / "rank-0.jsonl").exists():
                if process.poll() is not None:
                    raise UsageError(f"the run that was to be watched ended with {process.returncode}")
                time.sleep(0.05)
            url, server = held.enter_context(served(run))
            held.enter_context(_counting(measured, server, process.pid))
            held.enter_context(_asking(measured, url) if page is None else _watching(measured, url, page))
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise UsageError(f"a run of the bench ended with {process.returncode}: {' '.join(command)}")
    measured.seconds = used.ru_utime + used.ru_stime
    return measured


@contextlib.contextmanager
def _asking(measured: Measured, url: str) -> Iterator[None]:
    """Ask as the page does that shows ranks × time: what is new once a second, and the steps when there are more."""
    ended = threading.Event()

    def ask(path: str, **told: object) -> bytes:
        measured.asked += 1
        measured.paths.append(path)
        query = f"?{urlencode(told)}" if told else ""
        with urlopen(f"{url}{path}{query}", timeout=60) as answer:
            content: bytes = answer.read()
            return content

    def look() -> None:
        run = json.loads(ask("api/runs"))["first"]
        since, shown = "", 0
        while not ended.is_set():
            began = time.monotonic()
            with contextlib.suppress(OSError, ValueError):  # as the page, which asks again
                state = json.loads(ask("api/state", run=run, since=since))
                since, (_, steps) = state["until"], state["steps"]
                if steps > shown:
                    query = {"from": 0, "to": steps, "bins": _BINS, "columns": _COLUMNS, "stats": "mean"}
                    ask("api/window", run=run, **query)
                    shown = steps
            ended.wait(min(_IDLE_SECONDS, max(_LOOK_SECONDS, _REST * (time.monotonic() - began))))

    thread = threading.Thread(target=look, name="asks as a page", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(60)


@contextlib.contextmanager
def _watching(measured: Measured, url: str, page: Any) -> Iterator[None]:
    def note(request: Any) -> None:
        measured.asked += 1
        measured.paths.append(request.url.removeprefix(url).partition("?")[0])

    page.on("request", note)
    page.goto(f"{url}#ranks")
    try:
        yield
    finally:
        page.evaluate("0")  # requests are told of when the browser is asked something


@contextlib.contextmanager
def _counting(measured: Measured, server: int, training: int) -> Iterator[None]:
    """CPU seconds of the server from its start, and of the browser from now, as far as their processes still live."""
    before = _seconds_below(os.getpid(), {training, server})
    try:
        yield
    finally:
        measured.server_seconds = _seconds(server)
        measured.browser_seconds = max(0.0, _seconds_below(os.getpid(), {training, server}) - before)


def _seconds_below(top: int, without: set[int]) -> float:
    """Of all processes that descend from one, leaving out those below some others."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                children.setdefault(int(_stat(int(name))[1]), []).append(int(name))
    total, left = 0.0, list(children.get(top, []))
    while left:
        pid = left.pop()
        if pid not in without:
            total += _seconds(pid)
            left += children.get(pid, [])
    return total


def _seconds(pid: int) -> float:
    with contextlib.suppress(OSError):
        used = _stat(pid)
        return (int(used[11]) + int(used[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _stat(pid: int) -> list[str]:
    """What the kernel tells of a process, after its name."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
