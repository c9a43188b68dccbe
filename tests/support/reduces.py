"""Ranks that reduce random gradients, again and again, and compare with a plain tree sum."""

import gc
import os
import random
import resource
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

import dure
from dure.comm import tree
from dure.comm.reduce.exchanger import Exchange, Pieces
from dure.data.shards import shards_of_rank

SIZES = (
    0,
    1,
    2,
    3,
    15,
    16,
    17,
    63,
    64,
    65,
    1000,
    4099,
    20_003,
    40_009,
    70_001,
)  # small buckets, and those in place
HUGE = 3_000_003


def leaf(trial, shard, numel, dtype):
    """A shard's gradient: the same on whichever rank it is made."""
    dice = torch.Generator().manual_seed(trial * 1000 + shard)
    return (torch.randn(numel, generator=dice) * 10.0 ** random.Random(trial + shard).randint(-6, 6)).to(
        dtype
    )


def plain_tree_sum(leaves, scale, bf16):
    """What one process gets: the tree, node by node, as its definition says."""

    def total(values):
        if len(values) == 1:
            return values[0]
        half = 1
        while half * 2 < len(values):
            half *= 2
        left, right = total(values[:half]), total(values[half:])
        if bf16 and len(values) == len(leaves):
            left, right = left.bfloat16().to(left.dtype), right.bfloat16().to(right.dtype)
        return left + right

    return total(leaves) * scale


def trials(count, seed, wire="fp32", transport="auto"):
    """Entry point: `count` random reduces; returns how many were not the plain sum's bits."""
    return trials_of([(count, seed, wire, transport)])[0]


def trials_of(cases):
    """Entry point: several rounds of trials in one process; a team stays until the end, for leaving ends them all."""
    with ExitStack() as teams:
        return [
            _trials(
                teams.enter_context(dure.start(shards=16, wire=wire, transport=transport)), count, seed, wire
            )
            for count, seed, wire, transport in cases
        ]


def _trials(team, count, seed, wire):
    wrong = []
    ranks = team.topology.size
    exchanger = team.exchanger()
    dice = random.Random(seed)
    for trial in range(count):
        shards = 16
        active = dice.randint(1, shards)
        numel = HUGE if trial % 200 == 199 else dice.choice(SIZES)
        dtype = torch.float64 if trial % 7 == 0 and wire == "fp32" else torch.float32
        scale = 1.0 / dice.randint(1, 1000)
        shape = Pieces.of_step(ranks, shards, active)
        buffer = torch.zeros(numel, dtype=dtype)
        buffers = exchanger.buffers(trial % 3, buffer)
        pieces = shape.by_rank[team.rank]
        for position, piece in enumerate(pieces):
            target = buffers.out if position == len(pieces) - 1 else buffers.extra(position)
            leaves = [leaf(trial, shard, numel, dtype) for shard in piece]
            target.copy_(_subtree(leaves, piece, active, wire))
        exchanger.exchange(buffers, Exchange(shape, scale, 1 << team.rank % 7))
        assert exchanger.conclude() == sum(1 << rank for rank in range(min(ranks, 7)))
        expected = plain_tree_sum(
            [leaf(trial, s, numel, dtype) for s in range(active)], scale, wire == "bf16"
        )
        if not torch.equal(buffers.out, expected):
            wrong.append((trial, numel, active))
    exchanger.close()
    assert shards_of_rank(team.rank, ranks, 16)
    return wrong


def _subtree(leaves, piece, active, wire):
    sums = list(leaves)
    additions, _ = tree.join_order([range(leaf, leaf + 1) for leaf in piece], active)
    for at, (left, right) in enumerate(additions):
        if wire == "bf16" and len(piece) == active and at == len(additions) - 1:
            sums[left], sums[right] = (sums[i].bfloat16().to(sums[i].dtype) for i in (left, right))
        sums[left] = sums[left] + sums[right]
    return sums[0]


def many_then_rebuilds(count, rebuilt):
    """Entry point: both, one after the other."""
    with dure.start() as team:
        return _many(team, count), _rebuilds(team, rebuilt)


def _many(team, count):
    """Many reduces of three buckets; returns memory and descriptors at several moments."""
    exchanger = team.exchanger()
    shape = Pieces.of_step(team.topology.size, 8, 8)
    gradients = [torch.ones(10_000), torch.ones(33), torch.ones(100_000)]
    seen = []
    for turn in range(count):
        buffers = exchanger.buffers(turn % 3, gradients[turn % 3])
        exchanger.exchange(buffers, Exchange(shape, 0.5))
        exchanger.conclude()
        exchanger.total(torch.zeros(2, 8, dtype=torch.float64))
        if turn % (count // 10) == count // 10 - 1:
            gc.collect()
            seen.append((_resident(), len(os.listdir("/proc/self/fd"))))
    exchanger.close()
    return seen


def _rebuilds(team, count):
    """Buckets made anew again and again, as DDP's rebuild does; memory must not grow."""
    exchanger = team.exchanger()
    shape = Pieces.of_step(team.topology.size, 8, 8)
    seen = []
    for _ in range(count):
        buffers = exchanger.buffers(0, torch.ones(1_000_000))
        exchanger.exchange(buffers, Exchange(shape, 1.0))
        exchanger.conclude()
        seen.append((_resident(), len(os.listdir("/proc/self/fd"))))
    exchanger.close()
    return seen


def _resident():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def reduce_for_ever(folder):
    """Entry point: reduce until somebody is killed; every survivor writes down what it was told."""
    import signal
    import time

    from dure.base.errors import PeerLost

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher notices first; let us find out by ourselves
    with dure.start(hang_seconds=300) as team:
        exchanger = team.exchanger()
        shape = Pieces.of_step(team.topology.size, 8, 8)
        Path(folder, f"pid-{team.rank}").write_text(str(os.getpid()))
        buffer = torch.ones(200_000)
        # Setting up goes over Gloo; this is about reducing.
        exchanger.exchange(exchanger.buffers(0, buffer), Exchange(shape, 0.5))
        exchanger.conclude()
        dist.barrier()
        Path(folder, f"ready-{team.rank}").touch()
        try:
            while True:
                exchanger.exchange(exchanger.buffers(0, buffer), Exchange(shape, 0.5))
                exchanger.conclude()
        except PeerLost as lost:
            note = Path(folder, f"told-{team.rank}")
            note.with_suffix(".new").write_text(f"{time.monotonic()} {lost}")
            note.with_suffix(".new").rename(note)
            # Stay until all know, or the next one would miss us too.
            deadline = time.monotonic() + 50
            while (
                len(list(Path(folder).glob("told-?"))) < team.topology.size - 1
                and time.monotonic() < deadline
            ):
                time.sleep(0.02)
            raise
