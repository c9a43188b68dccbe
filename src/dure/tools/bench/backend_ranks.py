"""The ranks of `dure bench backend`: all-reduces alone, by Gloo and by the backend dure, in turn."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

import dure
from dure.base.errors import DureError
from dure.comm.topology import read_topology
from dure.tools.bench.reduce import RankFigures
from dure.tools.bench.reduce_ranks import take_turns, timed


def measure(sizes: Sequence[float], rounds: int) -> RankFigures:
    """Entry point of a rank."""
    with dure.start(shards=read_topology(os.environ).size) as team:
        groups = {"gloo": dist.new_group(backend="gloo"), "dure": dist.new_group(backend="dure")}
        figures = RankFigures("", {}, {})
        for mib in sizes:
            # Filled, so that its pages are there; with zeros, so that no number of sums overflows.
            tensors = {name: torch.full((int(mib * 2**20) // 4,), 0.0) for name in groups}
            contenders = {
                name: timed(lambda tensor=tensors[name], group=group: dist.all_reduce(tensor, group=group))  # type: ignore[misc]
                for name, group in groups.items()
            }
            for name, group in groups.items():
                ones = torch.ones_like(tensors[name])
                dist.all_reduce(ones, group=group)
                if not bool((ones == team.topology.size).all()):
                    raise DureError(f"{name}: the sum of ones over {team.topology.size} ranks is {ones}")
            take_turns(team, contenders, mib, rounds, figures)
        return figures
