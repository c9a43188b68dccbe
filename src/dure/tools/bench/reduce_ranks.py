"""The ranks of `dure bench reduce`: one all-reduce after the other, contender by contender, round by round."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

import dure
from dure.base.errors import DureError
from dure.comm.reduce.exchanger import Exchange, Exchanger, Pieces
from dure.comm.reduce.factory import WireName
from dure.comm.topology import read_topology
from dure.observe.heartbeat import Phase
from dure.team import Team
from dure.tools.bench.openmpi import Asker
from dure.tools.bench.reduce import RankFigures, repeats_for
from dure.tools.bench.wire import Wire
from dure.tools.lab.network import sent_bytes

Contender = Callable[[int], float]
"""Does its work so many times, and returns the seconds of one."""


def measure(sizes: list[float], rounds: int, wire: WireName, mpi_folder: str | None) -> RankFigures:
    """Entry point of a rank: every contender on every size, interleaved."""
    ranks = read_topology(os.environ).size
    with dure.start(shards=ranks, wire=wire) as team, contextlib.ExitStack() as peers:
        exchanger = team.exchanger()
        peers.callback(exchanger.close)
        plain = peers.enter_context(Wire(team)) if team.topology.nodes == 2 else None
        # The leader asks OpenMPI's ranks, and the others wait for it.
        asker = peers.enter_context(Asker(Path(mpi_folder), ranks)) if mpi_folder and team.is_leader else None
        figures = RankFigures(type(exchanger).__name__, {}, {})
        for mib in sizes:
            numel = int(mib * 2**20) // 4
            contenders = _ours(team, exchanger, numel) | _peers(team, plain, numel)
            if mpi_folder:
                contenders["openmpi"] = _of_openmpi(asker, numel)
            take_turns(team, contenders, mib, rounds, figures)
        return figures


def _ours(team: Team, exchanger: Exchanger, numel: int) -> dict[str, Contender]:
    shape = Pieces.of_step(team.topology.size, team.topology.size, team.topology.size)
    buffers, asked = exchanger.buffers(0, torch.ones(numel)), Exchange(shape, 1.0 / team.topology.size)

    def reduce() -> None:
        exchanger.exchange(buffers, asked)
        exchanger.conclude()

    run = timed(reduce)

    def reduce_and_check(repeats: int) -> float:
        seconds = run(repeats)
        if not bool((buffers.out == 1.0).all()):
            raise DureError(f"the mean of ones over {team.topology.size} ranks is not one: {buffers.out}")
        return seconds

    return {"dure": reduce_and_check}


def _peers(team: Team, plain: Wire | None, numel: int) -> dict[str, Contender]:
    # Filled, so that its pages are there; with zeros, so that no number of sums overflows.
    reduced, source, target = torch.full((numel,), 0.0), torch.ones(numel), torch.ones(numel)
    found = {
        "gloo": timed(lambda: dist.all_reduce(reduced)),
        "memcpy": timed(lambda: target.copy_(source)),
    }
    if plain is not None:
        # Every local rank carries its part: together one bucket's bytes a direction.
        part = -(-4 * numel // team.topology.local_size)
        sent, received = torch.ones(part, dtype=torch.uint8), torch.ones(part, dtype=torch.uint8)
        found["wire_limit"] = timed(lambda: plain.transfer(sent, received))
    return found


def _of_openmpi(asker: Asker | None, numel: int) -> Contender:
    return lambda repeats: asker.seconds(numel, repeats) if asker is not None else 0.0


def timed(call: Callable[[], object]) -> Contender:
    """A contender that makes a call again and again."""

    def run(repeats: int) -> float:
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - began) / repeats

    return run


def take_turns(
    team: Team, contenders: Mapping[str, Contender], mib: float, rounds: int, figures: RankFigures
) -> None:
    """Add each contender's figures for a size; the first round warms up and is thrown away."""
    repeats = repeats_for(mib)
    counts_bytes = team.topology.nodes > 1 and team.topology.is_node_leader
    for name in contenders:
        figures.seconds.setdefault(name, {})[mib] = []
        figures.sent.setdefault(name, {})[mib] = []
    for turn in range(rounds + 1):
        for name, run in contenders.items():
            team.heartbeat.beat(turn, Phase.EXCHANGE)
            # Between two barriers nobody sends for a contender: neither for the last one nor for the next.
            dist.barrier()
            before = sent_bytes() if counts_bytes else 0
            dist.barrier()
            seconds = run(repeats)
            dist.barrier()
            after = sent_bytes() if counts_bytes else 0
            if turn > 0:
                figures.seconds[name][mib].append(seconds)
                figures.sent[name][mib].append((after - before) / repeats)
