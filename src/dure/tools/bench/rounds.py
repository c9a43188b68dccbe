"""A rank's part of the step bench: check that contenders train the same, then time them in turn."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from dure.base.errors import DureError, ReplicasDiffer
from dure.device.fingerprint import fingerprint, named_weights
from dure.observe.heartbeat import Phase
from dure.team import Team, start
from dure.tools.bench.contenders import Contender, make_contenders
from dure.tools.bench.workload import (
    BUCKET_CAPS_MB,
    DURE,
    FINER,
    LIMIT,
    SHARDED,
    TUNED,
    RankFigures,
    Workload,
)

TOLERANCE = 1e-5
"""Contenders add in different orders, so they agree to rounding only."""


def run_rank(load: Workload, names: Sequence[str], ranks: int, rounds: int, steps: int) -> RankFigures:
    """The entry point of every rank."""
    with start(seed=load.seed, shards=ranks) as team, start(seed=load.seed, shards=load.shards) as finer:
        caps = time_bucket_caps(load, team, finer, rounds, steps) if TUNED in names else {}
        if caps:
            load = replace(load, bucket_cap_mb=min(caps, key=lambda cap: caps[cap]))
        contenders = make_contenders(names, load, team, finer)
        differences = check_first_step(contenders, team)
        figures = RankFigures(
            sum(parameter.numel() for parameter in contenders[names[0]].module.parameters()),
            {name: [] for name in names},
            {name: [] for name in names},
            differences,
            caps,
        )
        for number in range(rounds + 1):
            # Everyone comes after everyone in turn: what one leaves in the caches must not favour the same.
            for name in (*names[number % len(names) :], *names[: number % len(names)]):
                team.heartbeat.beat(number, Phase.COMPUTE)
                seconds, cpu_seconds = time_round(contenders[name], team, steps)
                if (
                    number > 0
                ):  # the first round warms up: DDP makes its buckets anew, memory is touched first
                    figures.seconds[name].append(seconds)
                    figures.cpu_seconds[name].append(cpu_seconds)
        for name, contender in contenders.items():
            must_be_in_step(name, contender.module, team)
        if torch.get_num_threads() != 1:
            raise DureError(
                f"a contender set {torch.get_num_threads()} threads per rank; every one must have one"
            )
        return figures


def time_round(contender: Contender, team: Team, steps: int) -> tuple[float, float]:
    """Seconds and CPU-seconds of one step on this rank; all ranks begin together."""
    team.group.sum(torch.zeros(1), "the start of a round")
    began, cpu_began = time.perf_counter(), time.process_time()
    for number in range(steps):
        contender.step(number)
    ended, cpu_ended = time.perf_counter(), time.process_time()
    return (ended - began) / steps, (cpu_ended - cpu_began) / steps


def time_bucket_caps(load: Workload, team: Team, finer: Team, rounds: int, steps: int) -> dict[float, float]:
    """Milliseconds of a step of DDP with each size of buckets: medians over rounds of the slowest rank's."""
    tried = {
        cap: make_contenders([TUNED], replace(load, bucket_cap_mb=cap), team, finer)[TUNED]
        for cap in BUCKET_CAPS_MB
    }
    seconds = torch.zeros(rounds + 1, len(tried))
    for number in range(rounds + 1):
        for at, contender in enumerate(tried.values()):
            team.heartbeat.beat(number, Phase.COMPUTE)
            seconds[number, at] = time_round(contender, team, steps)[0]
    team.group.extreme(seconds, "the size of buckets", largest=True)
    return dict(zip(tried, (seconds[1:].median(0).values * 1e3).tolist(), strict=True))


def check_first_step(contenders: Mapping[str, Contender], team: Team) -> dict[str, float]:
    """Take one step with each; returns the largest difference between its weights and dure's.

    Figures of a contender that does not average over the ranks, or trains something else, mean nothing.
    """
    gradients: dict[str, list[torch.Tensor]] = {}
    for name, contender in contenders.items():
        contender.forward_backward(0)
        gradients[name] = [_gradient(parameter) for parameter in contender.module.parameters()]
        contender.update()
        must_be_in_step(name, contender.module, team)
    ours = DURE if DURE in contenders else FINER
    largest = max(gradient.abs().max() for gradient in gradients[ours])
    differences = {}
    for name, contender in contenders.items():
        if name in (ours, LIMIT):
            continue
        # Ranks that share the optimizer's work have the gradients of their own parts alone; their weights tell.
        off = 0.0 if name == SHARDED else float(_furthest(gradients[ours], gradients[name]) / largest)
        apart = float(_furthest(contenders[ours].module.parameters(), contender.module.parameters()))
        if off > TOLERANCE or apart > TOLERANCE:
            raise DureError(
                f"after one step {name} is not where dure is: gradients differ by {off:.1e} of the largest, weights "
                f"by {apart:.1e}, {TOLERANCE:.0e} is rounding; they do not train the same"
            )
        differences[name] = apart
    return differences


def must_be_in_step(name: str, module: nn.Module, team: Team) -> None:
    """Raise unless the replicas are the same bits (with the limit: unless they are not)."""
    everyones = team.group.gather(fingerprint(named_weights(module)), f"comparing {name}'s weights")
    if team.topology.size == 1:
        return
    if name == LIMIT and len(set(everyones)) == 1:
        raise DureError(
            "without synchronisation all ranks have the same weights: they trained on the same samples"
        )
    if name != LIMIT and len(set(everyones)) > 1:
        raise ReplicasDiffer(f"{name}'s replicas differ after a step: {', '.join(everyones)}")


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad.clone()


@torch.no_grad()
def _furthest(some: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.stack([(one - other).abs().max() for one, other in zip(some, others, strict=True)]).max()
