"""Entry point of ranks that measure this machine for the planner: one all-reduce of several sizes, and arithmetic."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dure.comm.reduce.exchanger import Exchange, Pieces
from dure.observe.heartbeat import Phase
from dure.team import start

ROUNDS = 9
WIDTH = 512
"""Of the matrices that are multiplied."""


@dataclass(frozen=True)
class Probed:
    """What one rank measured."""

    exchange: dict[int, list[float]]
    """Seconds of one all-reduce, by bytes; one entry a round."""
    flops: float


def measure(sizes: Sequence[int]) -> Probed:
    """All-reduces of so many bytes, the way a step does them; and what this rank computes in a second."""
    with start() as team:
        ranks = team.topology.size
        shape = Pieces.of_step(ranks, ranks, ranks)
        exchanger = team.exchanger()
        found: dict[int, list[float]] = {}
        for index, nbytes in enumerate(sizes):
            buffers = exchanger.buffers(index, torch.ones(max(1, nbytes // 4)))
            repeats = max(1, min(50, (8 << 20) // nbytes))
            for turn in range(ROUNDS + 1):
                team.heartbeat.beat(turn, Phase.EXCHANGE)
                team.barrier()
                began = time.perf_counter()
                for _ in range(repeats):
                    exchanger.exchange(buffers, Exchange(shape, 1.0 / ranks))
                    exchanger.conclude()
                if turn:  # the first warms up
                    found.setdefault(nbytes, []).append((time.perf_counter() - began) / repeats)
        exchanger.close()
        return Probed(found, _flops())


def _flops() -> float:
    left, right = torch.rand(WIDTH, WIDTH), torch.rand(WIDTH, WIDTH)
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - began)
    return 2.0 * WIDTH**3 / min(seconds)
