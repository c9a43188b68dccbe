"""The ranks of `dure bench checkpoint`: what a step waits for, and how fast a state gets to the disk."""

from __future__ import annotations

import mmap
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import async_save, save

import dure
from dure.base.errors import DureError
from dure.checkpoint.capture import Capture
from dure.checkpoint.memory_tier import MemoryTier, memory_tier
from dure.checkpoint.snapshot import make_present
from dure.checkpoint.state import Share, State
from dure.checkpoint.writer import WRITE_SECONDS, CheckpointWriter, Retention, SaveResult
from dure.comm.topology import read_topology
from dure.observe.heartbeat import Phase
from dure.storage import open_store
from dure.team import Team
from dure.tools.bench.checkpoint import Flat, RankFigures, Task
from dure.tools.bench.checkpoint_task import model

_CHUNK_BYTES = 8 << 20


class Trained:
    """A model whose optimizer has a state, and the two tiers that its states go to."""

    def __init__(self, team: Team, width: int, layers: int, storage: Path) -> None:
        self.team = team
        self.module: nn.Module = model(width, layers)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), fused=True)
        for parameter in self.module.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer.step()
        self.optimizer.zero_grad()  # gradients are not part of a state
        self._capture = Capture(self.module, self.optimizer, None)
        self.outcomes: list[SaveResult] = []
        self.share = Share(team.rank, team.topology.size)
        storage.mkdir(parents=True, exist_ok=True)
        group = team.group.twin(WRITE_SECONDS)
        self.writer = CheckpointWriter(
            open_store(storage), group, Retention(1), lambda: None, self.outcomes.append
        )
        self.memory = self._memory_tier()
        self.step = 0
        state = self.capture(self.share)  # as `CheckpointManager` does
        make_present([*self.memory.buffers(state), self.writer.buffer(state)])

    def _memory_tier(self) -> MemoryTier:
        topology = self.team.topology
        found = memory_tier(os.environ, topology.local_rank, topology.local_size, self.team.group, 1)
        if found is None:
            raise DureError("the launcher offers no memory for states")
        found.begin(0)
        return found

    def capture(self, share: Share) -> State:
        """As a run does it."""
        facts = {"step": self.step, "line": "bench", "saved_at": "", "judged": {}, "recipe_words": {}}
        return self._capture.take(facts, share)

    def begin_save(self) -> None:
        """Snapshot and begin to write."""
        self.step += 1
        self.writer.begin(self.capture(self.share))

    def finish_save(self) -> None:
        """Wait for the writing."""
        if not self.writer.wait() or self.outcomes[-1].trouble is not None:
            raise DureError(f"a checkpoint could not be saved: {self.outcomes[-1].trouble}")

    def keep(self) -> None:
        """Keep a state in memory."""
        self.step += 1
        self.memory.keep(self.capture, self.step, lambda: "")
        if self.memory.trouble:
            raise DureError(self.memory.trouble)


def measure(task: Task) -> RankFigures:
    """Entry point of a rank."""
    with dure.start(shards=read_topology(os.environ).size) as team:
        trained = Trained(team, task.width, task.layers, Path(task.folder) / "dure")
        figures = RankFigures(trained.capture(Share(0, 1)).table.nbytes)
        if task.stall_rounds:
            _stalls(trained, task.stall_rounds, figures)
        if task.save_rounds:
            _bandwidth(trained, task, figures)
        trained.memory.close()
        return figures


def _stalls(trained: Trained, rounds: int, figures: RankFigures) -> None:
    """What a step waits for, beside one plain copy of as many bytes by the same ranks at once."""
    own = sum(piece.nbytes for piece in trained.capture(trained.share).pieces)
    source, target = torch.ones(own, dtype=torch.uint8), torch.ones(own, dtype=torch.uint8)
    into, out_of = target.numpy(), source.numpy()
    calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "torch_copy": (lambda: target.copy_(source), lambda: None),
        "copy": (lambda: numpy.copyto(into, out_of), lambda: None),  # libc's, which knows how to copy so much
        "snapshot": (trained.begin_save, trained.finish_save),
        "memory": (trained.keep, trained.memory.settle),
    }
    for turn in range(rounds + 2):  # the first time in each of the two slots is told apart
        for name, (call, settle) in calls.items():
            seconds = _timed(trained.team, call)
            settle()
            figures.stalls.setdefault(name if turn > 1 else f"first_{name}", []).append(seconds)


Way = Callable[[Path], float | None]
"""Saves into a folder; returns what the caller waited for, where that is less than all of it."""


def _bandwidth(trained: Trained, task: Task, figures: RankFigures) -> None:
    """Seconds until a whole state is on the disk, for each way in turn; the first turn warms up."""
    ways = _ways(trained, Path(task.folder))
    for turn in range(task.save_rounds + 1):
        for name, way in ways.items():
            folder = Path(task.folder) / f"{name}-{turn}"
            if trained.team.is_leader:
                folder.mkdir()
            waited: list[float | None] = []
            seconds = _timed(trained.team, lambda way=way, to=folder, w=waited: w.append(way(to)))  # type: ignore[misc]
            dist.barrier()
            if turn > 0:
                figures.saves.setdefault(name, []).append(seconds)
                figures.waits.setdefault(name, []).append(seconds if waited[0] is None else waited[0])
            if trained.team.is_leader:
                _check_size(name, folder, figures.state_bytes)
                shutil.rmtree(folder)


def _ways(trained: Trained, top: Path) -> dict[str, Way]:
    nbytes = sum(piece.nbytes for piece in trained.capture(trained.share).pieces)
    plain = memoryview(mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE))
    plain[:] = b"1" * len(plain)
    # As torch's documents advise: the thread that saves must not share a group with training.
    group = dist.new_group(backend="gloo")

    def disk(folder: Path, flags: int = 0) -> None:
        path = folder / f"part-{trained.team.rank}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flags)
        for start in range(0, len(plain), _CHUNK_BYTES):
            os.write(descriptor, plain[start : start + _CHUNK_BYTES])
        os.fsync(descriptor)
        os.close(descriptor)

    def disk_past_cache(folder: Path) -> None:
        disk(folder, os.O_DIRECT)

    def ours(folder: Path) -> float:
        began = time.perf_counter()
        trained.begin_save()
        waited = time.perf_counter() - began
        trained.finish_save()
        if trained.team.is_leader:  # where its size is looked at like the others'
            (top / "dure" / str(trained.outcomes[-1].name)).rename(folder / "dure")
        return waited

    def torch_save(folder: Path) -> None:
        if trained.team.is_leader:
            with (folder / "checkpoint.pt").open("wb") as file:
                torch.save(_state_dict(trained), file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()  # training cannot go on without rank 0

    def torch_sync(folder: Path) -> None:
        save(_state_dict(trained), checkpoint_id=str(folder))

    def torch_async(folder: Path) -> float:
        began = time.perf_counter()
        saving: Any = async_save(_state_dict(trained), checkpoint_id=str(folder), process_group=group)
        waited = time.perf_counter() - began
        saving.result(timeout=WRITE_SECONDS)
        return waited

    return {
        "disk": disk,
        "disk_past_cache": disk_past_cache,
        "dure": ours,
        "torch_save": torch_save,
        "dcp": torch_sync,
        "dcp_async": torch_async,
    }


def _state_dict(trained: Trained) -> dict[str, Any]:
    return {"model": trained.module.state_dict(), "optimizer": trained.optimizer.state_dict()}


def _check_size(name: str, folder: Path, nbytes: int) -> None:
    found = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if found < nbytes * 0.99:
        raise DureError(f"{name} wrote {found:,} bytes of a state of {nbytes:,}: its time says nothing")


def _timed(team: Team, call: Callable[[], object]) -> float:
    team.heartbeat.beat(0, Phase.SAVE)
    dist.barrier()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def save_often(folder: str, width: int, layers: int, looks: tuple[int, ...]) -> list[Flat]:
    """Entry point of a rank: save and keep states many times; what memory they take after so many of them."""
    with dure.start(shards=read_topology(os.environ).size) as team:
        trained = Trained(team, width, layers, Path(folder) / "often")
        found = []
        for number in range(1, max(looks) + 1):
            team.heartbeat.beat(number, Phase.SAVE)
            trained.begin_save()
            trained.keep()
            trained.finish_save()
            if number in looks:
                found.append(_memory_now(trained, number))
        trained.memory.close()
        return found


def _memory_now(trained: Trained, saves: int) -> Flat:
    status = Path("/proc/self/status").read_text().splitlines()
    kib = {line.split(":")[0]: line.split()[1] for line in status if line.startswith("Rss")}
    maps = Path("/proc/self/maps").read_text().splitlines()
    shared = sum("/dev/shm/" in line or "/memfd:" in line for line in maps)
    return Flat(saves, int(kib["RssAnon"]) << 10, trained.memory.held_bytes, shared)
