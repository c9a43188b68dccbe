"""Models and optimizers for the sharded optimizer's tests, trained with and without sharding in one team."""

import argparse
import functools
import os
import signal

import torch
import torch.nn.functional as F
from torch import nn

import dure
from dure.comm import param_sync as handover
from dure.comm import sharded_optimizer as sharded
from dure.device.fingerprint import weights_sha256
from support.features import Branches, Points

STEPS = 21
O = torch.optim  # noqa: E741
OPTIMIZERS = {
    "AdamW": (O.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "fused": True}),
    "AdamW, foreach": (O.AdamW, {"lr": 1e-2, "foreach": True}),
    "AdamW, amsgrad": (O.AdamW, {"lr": 1e-2, "amsgrad": True, "fused": True}),
    "Adam": (O.Adam, {"lr": 1e-2, "weight_decay": 0.1, "fused": True}),
    "SGD": (O.SGD, {"lr": 0.1, "fused": True}),
    "SGD, momentum": (
        O.SGD,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01, "fused": True},
    ),
    "SGD, Nesterov": (
        O.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "fused": True},
    ),
    "Adagrad": (O.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.01, "fused": True}),
    "RMSprop": (O.RMSprop, {"momentum": 0.9, "centered": True, "weight_decay": 0.01}),
    "NAdam": (O.NAdam, {"lr": 1e-2, "weight_decay": 0.01}),
    "RAdam": (O.RAdam, {"lr": 1e-2, "weight_decay": 0.01}),
    "Adamax": (O.Adamax, {"lr": 1e-2, "weight_decay": 0.01}),
    "Adadelta": (O.Adadelta, {"lr": 0.5, "weight_decay": 0.01}),
    "ASGD": (O.ASGD, {"lr": 0.1, "weight_decay": 0.01}),
    "Rprop": (O.Rprop, {"lr": 1e-2}),
}


class Odd(nn.Module):
    """Odd sizes, large and small, tied and frozen weights, a scalar, weights with other strides, mixed types."""

    def __init__(self, low=torch.bfloat16):
        super().__init__()
        self.inner = nn.Linear(6, 519)
        self.table = nn.Linear(519, 97, bias=False)
        self.back = nn.Linear(97, 519)
        self.back.weight.requires_grad_(False)
        self.images = nn.Conv2d(3, 17, 3, bias=False).to(memory_format=torch.channels_last)
        self.wide = nn.Conv2d(31, 47, 3, bias=False).to(memory_format=torch.channels_last)
        self.long = nn.Parameter(torch.randn(53, 59, dtype=torch.float64) * 0.1)
        self.short = nn.Parameter((torch.randn(97, 131) * 0.1).to(low))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.out = nn.Linear(519, 2)
        self.tied = nn.Linear(519, 97, bias=False)
        self.tied.weight = self.table.weight

    def forward(self, points):
        hidden = torch.tanh(self.inner(points))
        hidden = hidden + torch.tanh(self.back(self.table(hidden) + self.tied(hidden.flip(1))))
        weights = (self.images.weight.square().sum() + self.wide.weight.square().sum()) * 1e-2
        mixed = torch.tanh(hidden[:, :97].to(self.short.dtype) @ self.short).float()
        pulled = (hidden[:, :53].double() @ self.long).float()
        extra = mixed.mean(1, keepdim=True) + pulled.mean(1, keepdim=True)
        return self.out(hidden) * self.scale + weights + extra


def groups_of(module):
    """Two groups with settings of their own; the frozen weight is in one of them."""
    large = [p for p in module.parameters() if p.dim() > 1]
    small = [p for p in module.parameters() if p.dim() <= 1]
    return [{"params": large}, {"params": small, "weight_decay": 0.0, "lr": 5e-3}]


def train(
    team,
    make,
    *,
    shard,
    share_weights=False,
    model=Odd,
    clip_norm=0.5,
    find_unused=False,
    own_gradients=False,
    twice=False,
    after_step=lambda *_: None,
):
    """The sha256 of the weights, the last norm, the fingerprint, the last learning rates, the state's bytes."""
    torch.manual_seed(3)
    module = model()
    replica = team.replicate(module, find_unused=find_unused)
    optimizer = make(module)
    if shard:
        how = {"share_weights": share_weights, "own_gradients": own_gradients}
        assert team.shard_optimizer(replica, optimizer, **how) is optimizer
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.3 * step))
    norm = None
    for batch in team.batches(Points(samples=61), global_batch=16, steps=STEPS):
        for _ in range(1 + twice):  # the first one's gradients are not applied
            team.forward_backward(replica, batch, dure.step.loss.as_sum(F.cross_entropy))
        norm = team.update(replica, optimizer, schedule=schedule, clip_norm=clip_norm)
        after_step(module, optimizer)
    found = team.prove(replica, optimizer)
    rates = [group["lr"] for group in optimizer.param_groups]
    return weights_sha256(module), norm, found, rates, state_bytes(optimizer)


def state_bytes(optimizer):
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def optimizer_named(name):
    kind, arguments = OPTIMIZERS[name]
    return lambda module: kind(groups_of(module), **arguments)


def low_precision(name):
    """torch's fused SGD leaves parts of a bf16 momentum unwritten: whatever was in memory stays there."""
    return torch.float32 if name in ("SGD, momentum", "SGD, Nesterov") else torch.bfloat16


IN_ONE_MEMORY = ("AdamW", "SGD, Nesterov", "RMSprop", "Adagrad")


def train_each(names):
    """Entry point of a rank: every optimizer sharded, and on one rank as it is; by way, then by name."""
    ways = {"copied": {"shard": True}, "one memory": {"shard": True, "share_weights": True}}
    with dure.start(seed=5, shards=4) as team:
        if team.topology.size == 1:
            ways = {"not sharded": {"shard": False}, "alone": {"shard": True}}
        return {
            way: {
                name: train(
                    team, optimizer_named(name), model=functools.partial(Odd, low_precision(name)), **options
                )
                for name in names
                if way not in ("one memory", "alone") or name in IN_ONE_MEMORY
            }
            for way, options in ways.items()
        }


def momentum(module):
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2, fused=True)


class LargeBranches(Branches):
    def __init__(self):
        super().__init__(never=True)
        self.left, self.right, self.out = nn.Linear(6, 519), nn.Linear(6, 519), nn.Linear(519, 2)
        self.never = nn.Linear(90, 80)


def clamp(module, optimizer):
    """What some scripts do between steps: write to the weights, on all ranks alike."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.99).clamp_(-0.5, 0.5)


def cannot_share(*_):
    raise OSError("no shared memory today")


def train_variants(team):
    """What else must not change a bit; (without, with) sharding by name."""

    def both(**options):
        return [
            train(team, options.pop("make", optimizer_named("AdamW")), shard=s, **options) for s in (0, 1)
        ]

    found = {}
    found["no clipping"] = both(clip_norm=None)
    found["unused"] = [
        train(team, momentum, shard=shard, model=LargeBranches, find_unused=True) for shard in (False, True)
    ]
    for name, options in {
        "own gradients": {},
        "own gradients, one memory": {"share_weights": True},
        "own gradients, steps not applied": {"twice": True},
    }.items():
        found[name] = both(clip_norm=None, own_gradients=True, **options)
    found["own gradients, unused"] = [
        train(
            team,
            momentum,
            shard=shard,
            model=LargeBranches,
            find_unused=True,
            clip_norm=None,
            own_gradients=True,
        )
        for shard in (False, True)
    ]
    found["weights written in between"] = both(after_step=clamp)
    sharded.NodeMemory = cannot_share
    found["over Gloo"] = both(share_weights=True)
    return found


def refusals(team):
    """What a sharded optimizer does not take, and how it says so."""
    told = {}

    def note(name, act):
        try:
            act()
        except dure.base.errors.DureError as error:
            told[name] = f"{type(error).__name__}: {error}"

    module = nn.Sequential(nn.Linear(40, 200), nn.Linear(200, 40))
    model = team.replicate(module)
    weights = [p for p in module.parameters() if p.dim() == 2]
    for kind in (O.Adafactor, O.Muon, O.SparseAdam):
        note(kind.__name__, lambda kind=kind: team.shard_optimizer(model, kind(weights)))
    note("LBFGS", lambda: team.shard_optimizer(model, O.LBFGS(weights)))

    class Mine(O.SGD):
        pass

    note("Mine", lambda: team.shard_optimizer(model, Mine(weights)))
    note("foreign", lambda: team.shard_optimizer(model, O.SGD([nn.Parameter(torch.ones(3))])))
    shared = team.shard_optimizer(model, O.SGD(weights), share_weights=True)
    with torch.no_grad():
        module[1].weight.mul_(1.0)
    note("written", shared.step)
    note("some", lambda: team.shard_optimizer(model, O.SGD(weights), own_gradients=True))
    optimizer = team.shard_optimizer(model, O.SGD(weights))
    note("closure", lambda: optimizer.step(lambda: 0.0))
    module[0].weight.data = module[0].weight.data.clone()
    note("moved", optimizer.step)
    return told


def variants_and_refusals():
    """Entry point of a rank: both. The refusals first: the last variant takes shared memory away."""
    with dure.start(seed=5, shards=4) as team:
        told = refusals(team)
        return train_variants(team), told


def die_in_update(rank, ranks, port, victim):
    """A rank that somebody started by hand: the victim is killed in its 5th update, its part half handed over."""
    updates = 0

    def count(*_):
        nonlocal updates
        updates += 1

    def deadly(copies):
        if updates == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        copy(copies)

    copy = handover._Copies.run
    if rank == victim:
        handover._Copies.run = deadly
    place = argparse.Namespace(rank=rank, world_size=ranks, master=f"127.0.0.1:{port}")
    with dure.start(place, seed=5, shards=4) as team:
        train(team, momentum, shard=True, model=LargeBranches, find_unused=True, after_step=count)


def train_on_nodes(name):
    """Entry point of a rank of two nodes: the sha256 of the weights, sharded within each node, in three ways."""
    make = optimizer_named(name)
    with dure.start(seed=5, shards=4) as team:
        ways = ({}, {"share_weights": True}, {"own_gradients": True})
        shard = team.topology.size > 1
        return [train(team, make, shard=shard, clip_norm=None, **how)[0] for how in ways]
