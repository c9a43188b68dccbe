"""What a killed rank costs: `dure train` against torchrun with a checkpoint per epoch, the same model and data.

One of the ranks gets a SIGKILL in the middle of the second epoch; `dure train` goes on by itself, torchrun is
started again at once. From then on the clock runs until the next step is done, and until the step is done
that was under way.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dure.base.errors import DureError
from dure.base.run_folder import RunFolder
from dure.observe.events import Stepped
from dure.tools.drill.attempt import Attempt

BAR_SECONDS = 3.0
_STEPS_OF_EPOCH = 50
_EPOCHS = 3
_KILL_AT = _STEPS_OF_EPOCH + _STEPS_OF_EPOCH * 7 // 10
_VICTIM = 1
_DEADLINE_SECONDS = 300.0

_TASK = """\
import torch
from torch import nn
from torch.utils.data import TensorDataset


def model():
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def data(samples):
    dice = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(samples, 256, generator=dice), torch.randint(10, (samples,), generator=dice))
"""

_JOB = """\
name = "recover"
[model]
factory = "task.py:model"
[data]
factory = "task.py:data"
args = {{ samples = {samples} }}
global_batch = {batch}
[train]
epochs = {epochs}
"""

_PLAIN = """\
import json, os, sys, time
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from task import data, model

folder, samples, batch, epochs = sys.argv[1], *map(int, sys.argv[2:5])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = DistributedDataParallel(model())
optimizer = torch.optim.AdamW(net.parameters(), fused=True)
first, saved = 0, os.path.join(folder, "checkpoint.pt")
if os.path.exists(saved):
    state = torch.load(saved)
    net.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["epoch"] + 1
dataset = data(samples)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch // dist.get_world_size(), sampler=sampler)
with open(os.path.join(folder, f"steps-{rank}.jsonl"), "a", buffering=1) as steps:
    for epoch in range(first, epochs):
        sampler.set_epoch(epoch)
        for number, (inputs, target) in enumerate(loader, epoch * len(loader)):
            optimizer.zero_grad()
            F.cross_entropy(net(inputs), target).backward()
            optimizer.step()
            print(json.dumps([number, time.monotonic(), os.getpid()]), file=steps)
        if rank == 0:
            torch.save(
                {"model": net.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, saved + ".new"
            )
            os.replace(saved + ".new", saved)
        dist.barrier()
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Loss:
    """What one kill cost."""

    next_step: float
    """Seconds until any step was done again."""
    caught_up: float
    """Seconds until the step was done that was under way."""
    repeated: int


def bench_recover(*, ranks: int = 4, rounds: int = 3) -> dict[str, Any]:
    """Kill one of `ranks` ranks, `rounds` times with each side in turn; medians."""
    found: dict[str, list[Loss]] = {"dure": [], "torchrun": []}
    with tempfile.TemporaryDirectory(prefix="dure-bench-recover-") as name:
        folder = Path(name)
        batch = 16 * ranks
        samples = batch * _STEPS_OF_EPOCH
        (folder / "task.py").write_text(_TASK)
        (folder / "plain.py").write_text(_PLAIN)
        job = folder / "job.toml"
        job.write_text(_JOB.format(samples=samples, batch=batch, epochs=_EPOCHS))
        for at in range(rounds):
            place = folder / f"round-{at}"
            place.mkdir()
            arguments = [str(place), str(samples), str(batch), str(_EPOCHS)]
            found["torchrun"].append(_torchrun(folder / "plain.py", arguments, place, ranks))
            found["dure"].append(_dure(job, place / "run", ranks))
    figures: dict[str, Any] = {"ranks": ranks, "rounds": rounds, "steps_of_epoch": _STEPS_OF_EPOCH}
    for side, losses in found.items():
        figures[f"{side}_next_step_seconds"] = round(statistics.median(loss.next_step for loss in losses), 3)
        figures[f"{side}_caught_up_seconds"] = round(statistics.median(loss.caught_up for loss in losses), 3)
        figures[f"{side}_steps_repeated"] = statistics.median_high(loss.repeated for loss in losses)
        figures[f"{side}_rounds"] = [round(loss.next_step, 3) for loss in losses]
    figures["ratio"] = round(figures["torchrun_caught_up_seconds"] / figures["dure_caught_up_seconds"], 2)
    figures["bar_seconds"] = BAR_SECONDS
    figures["within_bar"] = figures["dure_next_step_seconds"] <= BAR_SECONDS
    return figures


def in_words(figures: dict[str, Any]) -> str:
    """The figures as a table for people."""
    lines = [f"kill -9 of one of {figures['ranks']} ranks, medians of {figures['rounds']}"]
    lines.append(f"{'':<10}{'next step after':>18}{'caught up after':>18}{'steps repeated':>17}")
    for side in ("dure", "torchrun"):
        next_step, caught_up = figures[f"{side}_next_step_seconds"], figures[f"{side}_caught_up_seconds"]
        repeated = figures[f"{side}_steps_repeated"]
        lines.append(f"{side:<10}{next_step:>16.2f} s{caught_up:>16.2f} s{repeated:>17}")
    return "\n".join([*lines, f"ratio of the time lost: {figures['ratio']}"])


def _dure(job: Path, folder: Path, ranks: int) -> Loss:
    attempt = Attempt(job, RunFolder(folder), ranks, ())
    attempt.start()
    try:
        beats = attempt.wait_for_step(_KILL_AT)
        step, at = max(beat.step for beat in beats), time.monotonic()
        os.kill(beats[_VICTIM].pid, signal.SIGKILL)
        attempt.summary()
    finally:
        attempt.end()
    later = [(one.event.step, one.at) for one in attempt.events() if isinstance(one.event, Stepped)]
    return _loss(later, step, at)


def _torchrun(script: Path, arguments: Sequence[str], folder: Path, ranks: int) -> Loss:
    first = _plain(script, arguments, folder, ranks)
    try:
        step, pid = _wait_for_step(folder / f"steps-{_VICTIM}.jsonl", first)
        at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        first.wait(_DEADLINE_SECONDS)
        # Started again at once, as a batch system would. Not by its own --max-restarts: where this
        # was tried, new ranks did no step within a minute, for a reason that was not looked into.
        second = _plain(script, arguments, folder, ranks)
        try:
            if second.wait(_DEADLINE_SECONDS) != 0:
                raise DureError(f"torchrun ended with {second.returncode}: {_tail(folder / 'stderr.txt')}")
        finally:
            second.kill()
            second.wait()
    except subprocess.TimeoutExpired:
        raise DureError(f"torchrun did not end within {_DEADLINE_SECONDS:.0f} s") from None
    finally:
        first.kill()
        first.wait()
    done = _steps(folder / "steps-0.jsonl")
    return _loss([(number, when) for number, when, who in done if who != done[0][2]], step, at)


def _plain(script: Path, arguments: Sequence[str], folder: Path, ranks: int) -> subprocess.Popen[bytes]:
    own = ["--standalone", "--nproc-per-node", str(ranks), "--log-dir", str(folder / "torchrun")]
    with (folder / "stderr.txt").open("a") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *own, str(script), *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )


def _wait_for_step(path: Path, process: subprocess.Popen[bytes]) -> tuple[int, int]:
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        done = _steps(path)
        if done and done[-1][0] + 1 >= _KILL_AT:
            return done[-1][0] + 1, done[-1][2]
        time.sleep(0.005)
    raise DureError(f"torchrun did not come to step {_KILL_AT}: {_tail(path.parent / 'stderr.txt')}")


def _steps(path: Path) -> list[tuple[int, float, int]]:
    if not path.exists():
        return []
    return [
        tuple(json.loads(line)) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")
    ]


def _loss(steps: Sequence[tuple[int, float]], step: int, at: float) -> Loss:
    """From (step, when done) after the kill, which struck in `step`."""
    later = [(number, when) for number, when in steps if when > at]
    again = next((place for place, (number, _) in enumerate(later) if number <= step), None)
    caught_up = next((when for number, when in later if number >= step), None)
    if again is None or caught_up is None:
        raise DureError("the run did not go on after the kill")
    number, when = later[again]
    return Loss(when - at, caught_up - at, max(0, step - number))


def _tail(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return lines[-1] if lines else "it said nothing"
