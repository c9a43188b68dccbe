"""A job on so many nodes of a machine: speed, memory, time and price, each with its uncertainty."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from dure.base.errors import UsageError
from dure.config import Job
from dure.plan.failures import Failures, failures
from dure.plan.links import Link, Shape, most_pieces, sent_by_node
from dure.plan.machine import ETHERNET_SHARE, Machine
from dure.plan.measurement import Measurement
from dure.plan.step import Phases, Team, Work, step_phases

Limit = Literal["shards", "cores", "exchange", "update", "data", "wait", "failures", "compute"]

SCALED_COMPUTE = 1.0
"""Uncertainty of computation that was measured on another machine and scaled by both machines' peaks: twice or half."""
OTHER_SHARDS = 0.2
"""Of a shard's computation when shards had another size where it was measured."""
DATA_SHEET = 0.25
"""Of a link or a storage as its data sheet has it."""
OVERLAP = 0.3
"""Of the part of the backward pass that the exchange may run beside."""
MTBF_HOURS = 6335.0
"""Of a node, where nobody knows: Llama 3, 419 interruptions in 54 days of 2,048 nodes."""
MTBF = 0.5
"""Its uncertainty."""
GBIT, HOP_SECONDS = 10.0, 50e-6
"""Of a network that nobody described: 10 Gbit/s Ethernet, and a message by TCP."""


@dataclass(frozen=True)
class Value:
    """A figure and the range that it is expected in."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Help:
    """One change, and how much faster it would make the team."""

    what: Literal["shards", "network", "wire", "shard_optimizer", "workers", "batch", "threads", "none"]
    gain: float
    """More samples a second, as a part."""


@dataclass(frozen=True)
class Outlook:
    """On so many nodes."""

    nodes: int
    ranks: int
    """All of them."""
    busy_ranks: int
    """That have a shard to compute."""
    phases: dict[str, float]
    """Seconds of one step."""
    step_seconds: Value
    samples_per_second: Value
    speedup: Value
    """Over one node."""
    efficiency: float
    """Of that many nodes."""
    speedup_of_rank: float
    """Over one rank alone on its node."""
    memory_gib: Value
    """Of one rank."""
    fits: bool
    sent_mb: float
    """By each node to the others, in one step."""
    failures: Failures
    hours: Value
    """To finish, with checkpoints and failures."""
    usd: Value | None
    limit: Limit
    """What keeps it from being that many times as fast, most of all."""
    help: Help


@dataclass(frozen=True)
class Assumed:
    """All that an outlook is computed from; what is uncertain of it is a field here."""

    work: Work
    team: Team
    steps: int
    batch: int
    rank_bytes: float
    memory_gib: float
    save_seconds: float
    restart_seconds: float
    node_mtbf_hours: float
    usd_per_node_hour: float | None
    unsure: dict[str, float] = field(default_factory=dict)
    """Relative uncertainty by what is unsure."""
    scaled: bool = False
    """Whether computation was scaled from another machine."""


@dataclass(frozen=True)
class Told:
    """What the user knows better."""

    usd: float | None = None
    """Of a node, for an hour."""
    mtbf_hours: float | None = None
    """Of a node."""
    gbit: float | None = None
    """Of the network, line rate of a node."""


def assume(job: Job, measured: Measurement, machine: Machine | None, told: Told) -> Assumed:
    """Of this machine, or of one that is described."""
    state = measured.state_bytes
    gradients = 4.0 * measured.parameters
    wire = 0.5 if job.reduce.wire == "bf16" else 1.0  # of the bytes, between nodes alone
    if machine is None:
        ranks, cores, links, scale = job.team.ranks, float(measured.cores), measured.links, 1.0
        network = _network(GBIT, HOP_SECONDS)
        jitter, crowding, memory = measured.jitter, measured.crowding, measured.memory_gib / ranks
        storage = measured.storage_bytes_per_second
        overlap = min(1.0, max(0.0, (cores - ranks) / ranks))
        unsure = {
            "compute": measured.shard.spread,
            "links": max(DATA_SHEET, *(timed.spread for timed in measured.exchange.values())),
            "jitter": 0.5,
        }
        mtbf, restart = MTBF_HOURS, measured.start_seconds
    else:
        gpus = machine.node.device == "cuda"
        ranks = machine.node.ranks if gpus else job.team.ranks
        cores = math.inf if gpus else max(1.0, machine.node.cores / job.team.threads)
        # A CPU's peak is all its cores'; a rank computes with its threads.
        peak = machine.node.tflops if gpus else machine.node.tflops * job.team.threads / machine.node.cores
        scale = measured.tflops / peak
        links = machine.links
        network = links.network
        jitter, crowding = machine.node.jitter, 1.0 if gpus else measured.crowding
        memory = machine.node.memory_gib if gpus else machine.node.memory_gib / ranks
        storage = machine.storage.mb_per_second * 1e6
        overlap = 1.0 if gpus else min(1.0, max(0.0, (cores - ranks) / ranks))
        unsure = {"compute": SCALED_COMPUTE, "links": DATA_SHEET, "jitter": 0.5, "storage": DATA_SHEET}
        mtbf, restart = (
            machine.reliability.node_mtbf_hours,
            machine.reliability.restart_seconds + measured.start_seconds,
        )
    if told.gbit is not None:
        network = _network(told.gbit, network.hop_seconds)
    links = replace(links, network=Link(network.bytes_per_second / wire, network.hop_seconds))
    price = machine.price.usd_per_node_hour if machine and machine.price else None
    larger = job.data.global_batch / job.team.shards / (measured.batch / measured.shards)
    work = Work(
        shards=job.team.shards,
        shard_seconds=measured.shard.seconds * larger * scale,
        gradient_bytes=gradients,
        update_seconds=measured.update.seconds * scale,
        data_seconds=measured.data.seconds * larger,
        sharded_update=job.train.shard_optimizer,
    )
    shape = Shape(1, ranks)
    stall = max(measured.save_stall.seconds * scale, 1e-4)
    if (measured.shards, measured.batch) != (job.team.shards, job.data.global_batch):
        unsure["compute"] = math.hypot(unsure["compute"], OTHER_SHARDS)
    unsure |= {"data": max(measured.data.spread, 0.2)}
    unsure |= {"overlap": OVERLAP, "mtbf": MTBF, "stall": max(measured.save_stall.spread, 0.2)}
    return Assumed(
        work=work,
        team=Team(shape, links, "slices", cores, crowding, jitter, overlap),
        steps=_steps(job, measured),
        batch=job.data.global_batch,
        rank_bytes=float(measured.rank_bytes),
        memory_gib=memory,
        save_seconds=stall,
        restart_seconds=restart + state / storage,
        node_mtbf_hours=mtbf if told.mtbf_hours is None else told.mtbf_hours,
        usd_per_node_hour=price if told.usd is None else told.usd,
        unsure=unsure,
        scaled=machine is not None,
    )


def outlook(assumed: Assumed, nodes: int) -> Outlook:
    """On so many nodes."""
    if nodes < 1:
        raise UsageError(f"--nodes has {nodes}; a team has at least one node")
    team = _on(assumed, nodes)
    phases = step_phases(assumed.work, team)
    one = step_phases(assumed.work, _on(assumed, 1))
    alone = step_phases(assumed.work, replace(assumed.team, shape=Shape(1, 1)))
    expected = _expected(assumed, nodes)
    memory = assumed.rank_bytes / 2**30
    usd = assumed.usd_per_node_hour
    hours = _range(assumed, lambda other: _expected(other, nodes).hours)
    return Outlook(
        nodes=nodes,
        ranks=team.shape.size,
        busy_ranks=min(team.shape.size, assumed.work.shards),
        phases={name: seconds for name, seconds in asdict(phases).items() if name != "hidden"},
        step_seconds=_range(assumed, lambda other: step_phases(other.work, _on(other, nodes)).step),
        samples_per_second=_range(
            assumed, lambda other: other.batch / step_phases(other.work, _on(other, nodes)).step
        ),
        speedup=_range(assumed, lambda other: _speedup(other, nodes)),
        efficiency=one.step / phases.step / nodes,
        speedup_of_rank=alone.step / phases.step,
        memory_gib=Value(memory, memory * 0.9, memory * 1.1),
        fits=memory * 1.1 <= assumed.memory_gib,
        sent_mb=sent_by_node(assumed.work.gradient_bytes, team.shape, team.collective) / 1e6,
        failures=expected,
        hours=hours,
        usd=None
        if usd is None
        else Value(*(usd * nodes * part for part in (hours.value, hours.low, hours.high))),
        limit=_limit(assumed, team, phases, expected),
        help=_help(assumed, nodes, phases.step),
    )


def as_json(outlooks: Sequence[Outlook]) -> list[dict[str, Any]]:
    """Plain values."""
    return [asdict(one) for one in outlooks]


def _network(gbit: float, hop_seconds: float) -> Link:
    return Link(gbit * 1e9 / 8 * ETHERNET_SHARE, hop_seconds)


def _on(assumed: Assumed, nodes: int) -> Team:
    pieces = most_pieces(assumed.work.shards, nodes)
    return replace(assumed.team, shape=Shape(nodes, assumed.team.shape.ranks, pieces))


def _speedup(assumed: Assumed, nodes: int) -> float:
    one, many = (step_phases(assumed.work, _on(assumed, count)).step for count in (1, nodes))
    return one / many


def _expected(assumed: Assumed, nodes: int) -> Failures:
    return failures(
        steps=assumed.steps,
        step_seconds=step_phases(assumed.work, _on(assumed, nodes)).step,
        save_seconds=assumed.save_seconds,
        restart_seconds=assumed.restart_seconds,
        node_mtbf_hours=assumed.node_mtbf_hours,
        nodes=nodes,
    )


def _range(assumed: Assumed, figure: Callable[[Assumed], float]) -> Value:
    """A figure with what its inputs' uncertainties make of it: each is turned up and down alone, and the changes are
    added as independent ones are."""
    value = figure(assumed)
    up = down = 0.0
    for what, unsure in assumed.unsure.items():
        changes = [
            figure(_changed(assumed, what, factor)) - value for factor in (1 + unsure, 1 / (1 + unsure))
        ]
        up += max(0.0, *changes) ** 2
        down += max(0.0, *(-change for change in changes)) ** 2
    return Value(value, max(0.0, value - math.sqrt(down)), value + math.sqrt(up))


def _changed(assumed: Assumed, what: str, factor: float) -> Assumed:
    """With one of the unsure figures so many times as large."""
    work, team = assumed.work, assumed.team
    if what in ("compute", "data"):
        names = ("shard_seconds", "update_seconds") if what == "compute" else ("data_seconds",)
        return replace(assumed, work=replace(work, **{name: getattr(work, name) * factor for name in names}))
    if what in _OF_RUN:
        name, up = _OF_RUN[what]
        return replace(assumed, **{name: getattr(assumed, name) * (factor if up else 1 / factor)})
    return replace(assumed, team=_changed_team(team, what, factor))


_OF_RUN = {
    "mtbf": ("node_mtbf_hours", True),
    "stall": ("save_seconds", True),
    "storage": ("restart_seconds", False),
}


def _changed_team(team: Team, what: str, factor: float) -> Team:
    if what == "jitter":
        return replace(team, jitter=team.jitter * factor)
    if what == "overlap":
        return replace(team, overlap=min(1.0, team.overlap / factor))
    inside, network = (
        Link(link.bytes_per_second * factor, link.hop_seconds / factor)
        for link in (team.links.inside, team.links.network)
    )
    return replace(team, links=replace(team.links, inside=inside, network=network))


def _limit(assumed: Assumed, team: Team, phases: Phases, expected: Failures) -> Limit:
    """What takes most of what an ideal team would not need."""
    shape, work = team.shape, assumed.work
    ideal = work.shards * work.shard_seconds / shape.size
    turns = max(1.0, shape.ranks / team.cores)
    even = math.ceil(work.shards / shape.size) * work.shard_seconds
    lost: dict[Limit, float] = {
        "shards": even * turns - ideal * turns,
        "cores": phases.compute - even if turns > 1 or team.crowding > 1 else 0.0,
        "exchange": phases.exchange,
        "update": phases.update,
        "data": phases.data,
        "wait": phases.wait,
        "failures": expected.overhead * phases.step,
    }
    worst = max(lost, key=lambda name: lost[name])
    return worst if lost[worst] > 0.02 * phases.step else "compute"


def _help(assumed: Assumed, nodes: int, seconds: float) -> Help:
    """The one change that makes the team faster by most."""
    work, team = assumed.work, assumed.team
    ranks = nodes * team.shape.ranks
    tries: dict[str, Assumed] = {
        "network": replace(
            assumed,
            team=replace(
                team,
                links=replace(
                    team.links,
                    network=Link(team.links.network.bytes_per_second * 4, team.links.network.hop_seconds),
                ),
            ),
        ),
        "wire": replace(
            assumed,
            team=replace(
                team,
                links=replace(
                    team.links,
                    network=Link(team.links.network.bytes_per_second * 2, team.links.network.hop_seconds),
                ),
            ),
        ),
        "shard_optimizer": replace(assumed, work=replace(work, sharded_update=True)),
        "workers": replace(assumed, work=replace(work, data_seconds=0.0)),
        "batch": replace(assumed, work=replace(work, shard_seconds=work.shard_seconds * 2)),
    }
    if work.shards % ranks:
        more = -(-work.shards // ranks) * ranks
        tries["shards"] = replace(
            assumed, work=replace(work, shards=more, shard_seconds=work.shard_seconds * work.shards / more)
        )
    gains = {
        what: seconds / step_phases(other.work, _on(other, nodes)).step * (2 if what == "batch" else 1) - 1
        for what, other in tries.items()
    }
    best = max(gains, key=lambda what: gains[what])
    if gains[best] < 0.02:
        return Help("none", 0.0)
    return Help(best, gains[best])  # type: ignore[arg-type]


def _steps(job: Job, measured: Measurement) -> int:
    """Of the job as it is now; it may be longer than the one that was measured."""
    if job.train.steps is not None:
        return job.train.steps
    each = measured.samples / job.data.global_batch
    return (job.train.epochs or 1) * max(1, math.floor(each) if job.data.drop_last else math.ceil(each))
