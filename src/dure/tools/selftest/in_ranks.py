"""What every rank does in a self-test. Each function is an entry point for `run_team`; results are plain values."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dure.checkpoint.capture import Capture
from dure.checkpoint.snapshot import Snapshot
from dure.checkpoint.state import Share
from dure.comm import tree
from dure.comm.reduce.exchanger import BucketBuffers, Exchange, Exchanger, Pieces, Wire
from dure.comm.reduce.hook import GradientExchange, StepExchange
from dure.comm.reduce.step_totals import StepTotals
from dure.comm.reduce.subtree_stack import SubtreeStack
from dure.data.shards import shards_of_rank
from dure.device.accelerator import described, is_host, wait_for
from dure.device.fingerprint import weights_sha256
from dure.device.node import counts_waits, waits_counted
from dure.step.replica import wrap
from dure.team import Team, start
from dure.tools.selftest.jobs import BATCH, JOBS, InBf16

SHARDS = 8
LARGE = 25 * 2**20 // 4
"""Elements of 25 MiB."""
_TIMES = 5


def whole(wanted: str, folder: str, measures: bool) -> dict[str, Any]:
    """All of it in one team: the small jobs twice, the exchange, and with `measures` what takes time."""
    with start(seed=1, shards=SHARDS, device=wanted) as team:  # type: ignore[arg-type]
        found: dict[str, Any] = {
            "device": str(team.device),
            "described": described(team.device),
            "jobs": [{name: _trained(team, name) for name in JOBS} for _ in range(2)],
            "exchange": _exchanges(team),
        }
        if measures:
            found["overlap"] = _overlap(team)
            found["host_waits"] = _host_waits(team)
            found["against_backend"] = _against_backend(team)
            found["load"] = _loads(team, folder)
            found["checkpoint"] = _checkpoint_stall(team)
        return found


def watched(wanted: str, own_stream: bool) -> str:
    """One small job on the default stream or one of its own; for torch's sanitizer, which fails where work races."""
    with start(seed=1, shards=SHARDS, device=wanted) as team:  # type: ignore[arg-type]
        stream = torch.Stream(device=team.device) if own_stream else contextlib.nullcontext()
        with stream:
            return _trained(team, "transformer")


def killed_once(wanted: str, folder: str, kills: bool) -> str:
    """A job whose last rank is killed in its third step, the first time."""
    with start(seed=1, shards=SHARDS, device=wanted) as team:  # type: ignore[arg-type]
        job = JOBS["transformer"]
        replica = team.replicate(job.model())
        optimizer = torch.optim.AdamW(replica.parameters(), lr=1e-3, fused=True)
        checkpoint = team.checkpoint(model=replica, optimizer=optimizer, folder=folder, every=1)
        checkpoint.resume()
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        for batch in team.batches(job.dataset(), global_batch=BATCH, epochs=2):
            if kills and first and batch.step == 3 and team.rank == team.topology.size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            team.step(replica, optimizer, batch, job.loss)
            checkpoint.save_if_due()
        return weights_sha256(replica.module)


def _trained(team: Team, name: str) -> str:
    job = JOBS[name]
    torch.manual_seed(1)
    model = job.model()
    if job.in_bf16:
        model = InBf16(model, team.device.type)
    replica = team.replicate(model)
    optimizer = torch.optim.AdamW(replica.parameters(), lr=1e-3, fused=True)
    for batch in team.batches(job.dataset(), global_batch=BATCH, epochs=1):
        team.step(replica, optimizer, batch, job.loss)
    team.prove(replica, optimizer)
    return weights_sha256(replica.module)


def _exchanges(team: Team) -> dict[str, Any]:
    """Gradients by the exchange against the same tree on the CPU; of 8 shards 1, 3 or all have samples, so that ranks
    are without pieces."""
    exchanger = team.exchanger()
    wrong, without = [], 0
    for turn, active in enumerate((SHARDS, 1, 3)):
        for numel in (1, 1023, 65_537):
            shape = Pieces.of_step(team.topology.size, SHARDS, active)
            without += sum(not pieces for pieces in shape.by_rank)
            leaves = [_leaf(turn, shard, numel) for shard in range(active)]
            buffers = exchanger.buffers(0, torch.zeros(numel, device=team.device))
            own = shape.by_rank[team.rank]
            for position, piece in enumerate(own):
                into = buffers.out if position == len(own) - 1 else buffers.extra(position)
                into.copy_(_added([leaves[shard] for shard in piece], piece, active))
            exchanger.exchange(buffers, Exchange(shape, 1 / 3))
            exchanger.conclude()
            expected = _added(leaves, range(active), active) * (1 / 3)
            if not torch.equal(buffers.out.cpu(), expected):
                wrong.append([active, numel])
    exchanger.close()
    return {"wrong": wrong, "exchanges": 9, "ranks_without_pieces": without}


def _leaf(turn: int, shard: int, numel: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(turn * 100 + shard)
    return torch.randn(numel, generator=dice) * 10.0 ** (shard % 5 - 2)


def _added(leaves: list[torch.Tensor], piece: range, active: int) -> torch.Tensor:
    sums = [leaf.clone() for leaf in leaves]
    additions, _ = tree.join_order([range(leaf, leaf + 1) for leaf in piece], active)
    for left, right in additions:
        sums[left] = sums[left] + sums[right]
    return sums[0]


class _Watched:
    """An exchanger that notes when each exchange begins: where the host is, and where the device is."""

    def __init__(self, inner: Exchanger, device: torch.device) -> None:
        self._inner = inner
        self._device = device
        self.waits = inner.waits
        self.begun: list[tuple[float, torch.Event | None]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def exchange(self, buffers: BucketBuffers, asked: Exchange) -> None:
        """See `Exchanger`."""
        moment = None if is_host(self._device) else torch.Event(self._device, enable_timing=True)
        if moment is not None:
            moment.record(torch.accelerator.current_stream(self._device))
        self.begun.append((time.perf_counter(), moment))
        self._inner.exchange(buffers, asked)


def _overlap(team: Team) -> dict[str, Any]:
    """How many of a step's exchanges begin before the backward pass ends, by the device's own events."""
    module = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).to(team.device)
    replica = wrap(module, free_cores=1)
    exchanger = _Watched(team.exchanger(), team.device)
    stack = SubtreeStack(list(module.parameters()))
    exchange = GradientExchange(exchanger, stack, Wire())
    replica.register_comm_hook(None, exchange.hook)
    inputs = torch.ones(64, 512, device=team.device)
    shape = Pieces.of_step(team.topology.size, SHARDS, SHARDS)
    early, of = 0, 0
    for turn in range(4):
        exchanger.begun.clear()
        for parameter in module.parameters():
            parameter.grad = None
        own = shards_of_rank(team.rank, team.topology.size, SHARDS)
        for shard in own[:-1]:  # the other subtrees of a step, so that all places of the exchange are filled
            with replica.no_sync():
                replica(inputs).sum().backward()
            stack.push(shard, SHARDS)
        totals = StepTotals.empty(SHARDS, team.topology.size)
        totals.steps[team.rank] = turn
        step = StepExchange(shape, own[-1], totals)
        exchange.begin(step)
        total = replica(inputs).sum()
        total.backward()
        ended = None if is_host(team.device) else torch.Event(team.device, enable_timing=True)
        if ended is not None:
            ended.record(torch.accelerator.current_stream(team.device))
        exchange.finish()
        if turn:  # buckets are made anew after the first step
            wait_for(team.device)
            of += len(exchanger.begun)
            early += sum(
                at < step.handed_over_at
                if moment is None or ended is None
                else moment.elapsed_time(ended) > 0
                for at, moment in exchanger.begun
            )
    exchange.close()
    return {"exchanges": of, "begun_before_the_backward_pass_ended": early}


def _host_waits(team: Team) -> dict[str, Any]:
    """How often the training thread waits for the device in a step; None where torch cannot tell."""
    if is_host(team.device) or not counts_waits(team.device):
        return {"per_step": None}
    job = JOBS["transformer"]
    replica = team.replicate(job.model())
    optimizer = torch.optim.AdamW(replica.parameters(), lr=1e-3, fused=True)
    counted: list[int] = []
    for batch in team.batches(job.dataset(), global_batch=BATCH, epochs=2):
        with waits_counted() as waits:
            team.step(replica, optimizer, batch, job.loss)
        counted.append(waits())
    return {"per_step": min(counted)}


def _against_backend(team: Team) -> dict[str, Any]:
    """Milliseconds of 25 MiB by our exchange and by the backend's own all_reduce, which promises no bits."""
    exchanger = team.exchanger()
    shape = Pieces.of_step(team.topology.size, SHARDS, SHARDS)
    buffers = exchanger.buffers(0, torch.ones(LARGE, device=team.device))
    for position in range(len(shape.by_rank[team.rank]) - 1):
        buffers.extra(position).fill_(1.0)

    def ours() -> None:
        exchanger.exchange(buffers, Exchange(shape, 1.0))
        exchanger.conclude()

    plain = torch.ones(LARGE, device=team.device)
    found = {
        "exchange_ms": _milliseconds(team, ours),
        "all_reduce_ms": _milliseconds(team, lambda: dist.all_reduce(plain)),
        "mib": LARGE * 4 / 2**20,
    }
    exchanger.close()
    return found


def _milliseconds(team: Team, call: Any) -> float:
    """The median of some calls, each until its result is there."""
    took = []
    for _ in range(_TIMES):
        team.barrier()
        began = time.perf_counter()
        call()
        wait_for(team.device)
        took.append(time.perf_counter() - began)
    return round(sorted(took)[_TIMES // 2] * 1000, 3)


def _loads(team: Team, folder: str) -> dict[str, Any]:
    """Each way to load a file, in GB/s, and whether the weights are its bytes."""
    path = Path(folder) / "large.safetensors"
    expected = (Path(folder) / "large.sha256").read_text()
    found: dict[str, Any] = {}
    for how in ("slices", "rank0", "every-rank"):
        team.barrier()
        began = time.perf_counter()
        model = team.load(large, weights=path.name, how=how, storage=folder)
        model.to(team.device)
        wait_for(team.device)
        seconds = time.perf_counter() - began
        found[how] = {
            "gb_per_second": round(path.stat().st_size / seconds / 1e9, 3),
            "same_bytes": weights_sha256(model) == expected,
        }
    return found


def large() -> nn.Module:
    """16 MiB of weights."""
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))


def _checkpoint_stall(team: Team) -> dict[str, Any]:
    """How long a step waits for a checkpoint, which is written beside the next ones."""
    model = large().to(team.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    capture, snapshot = Capture(model, optimizer, None), Snapshot()
    share = Share(team.rank, team.topology.size)
    took, nbytes = [], 0
    for turn in range(_TIMES):
        wait_for(team.device)
        began = time.perf_counter()
        state = capture.take({"step": turn}, share)
        snapshot.take(state)
        took.append(time.perf_counter() - began)
        if state.neighbour is not None:
            state.neighbour.take()
        nbytes = sum(piece.nbytes for piece in state.pieces)
    return {
        "milliseconds": round(sorted(took)[_TIMES // 2] * 1000, 3),
        "mib_per_rank": round(nbytes / 2**20, 1),
    }
