"""Models with every feature that the promise covers, trained for a few steps inside one team."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

import dure
from dure.device.fingerprint import weights_sha256

STEPS = 14


class Points(Dataset):
    """Points in a plane with noise drawn anew at every access (seeded by the team)."""

    def __init__(self, samples=61, noise=True):
        dice = torch.Generator().manual_seed(7)
        self.points = torch.randn(samples, 6, generator=dice)
        self.noise = noise

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        point = self.points[index]
        noise = torch.randn(6) * 0.1 if self.noise else 0.0
        return point + noise, int(point.sum() > 0)


class Words(Dataset):
    """Sequences whose targets are partly ignored: shards differ in what they count."""

    def __len__(self):
        return 43

    def __getitem__(self, index):
        words = torch.randint(0, 20, (9,), generator=torch.Generator().manual_seed(index))
        target = words.roll(1)
        target[: index % 7] = -100
        return words, target


def plain():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))


def wide():
    """Its buckets are shared in place; small ones are copied."""
    return nn.Sequential(nn.Linear(6, 150), nn.ReLU(), nn.Linear(150, 150), nn.ReLU(), nn.Linear(150, 2))


def with_dropout_and_batchnorm():
    body = nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU())
    return nn.Sequential(body, nn.Dropout(0.3), nn.Flatten(), nn.Linear(16, 2))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.inner = nn.Linear(8, 8)
        self.out = nn.Linear(8, 20, bias=False)
        self.out.weight = self.words.weight

    def forward(self, words):
        return self.out(torch.tanh(self.inner(self.words(words))))


def frozen():
    model = plain()
    model[0].requires_grad_(False)
    return model


class Branches(nn.Module):
    """Takes one branch or the other, by the data: in some shards a branch is not used at all."""

    def __init__(self, never=False):
        super().__init__()
        self.left, self.right, self.out = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 2)
        self.never = nn.Linear(6, 8) if never else None

    def forward(self, points):
        branch = self.left if points[0, 0] > 0 else self.right
        return self.out(torch.relu(branch(points)))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 16))
        self.out = nn.Linear(16, 2)

    def forward(self, points):
        return self.out(checkpoint(self.body, points, use_reentrant=False))


class Running(nn.Module):
    """Keeps a buffer of its own with `.data`, as codebooks do; integers among them."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(6, 16), nn.Linear(16, 2)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.arange(1000.0))

    def forward(self, points):
        hidden = self.inner(points)
        self.mean.data.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        self.calls += 1
        return self.out(hidden - self.mean)


def half_precision():
    return plain().to(torch.bfloat16)


def half_points(output, target):
    return F.cross_entropy(output.float(), target, reduction="none")


class Float16Points(Points):
    def __getitem__(self, index):
        point, label = super().__getitem__(index)
        return point.to(torch.bfloat16), label


def groups(model):
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW(
        [{"params": decayed}, {"params": rest, "weight_decay": 0.0, "lr": 5e-3}], fused=True
    )


def adam(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2, fused=True)


FEATURES = {
    "plain": {},
    "buckets in shared memory": {"model": wide, "clip_norm": 0.05},
    "dropout and batchnorm": {"model": with_dropout_and_batchnorm},
    "blocks": {"split": "blocks"},
    "accumulation": {"model": with_dropout_and_batchnorm, "accumulate": 3},
    "clipping and schedule": {"clip_norm": 0.05, "schedule": True},
    "token-weighted, tied weights": {"model": Tied, "data": Words},
    "frozen weights": {"model": frozen},
    "unused in some shards": {"model": Branches, "find_unused": True, "optimizer": momentum},
    "never used": {"model": lambda: Branches(never=True), "find_unused": True, "optimizer": momentum},
    "activation checkpointing": {"model": Checkpointed},
    "buffers written with .data": {"model": Running},
    "bf16 weights": {"model": half_precision, "data": Float16Points, "loss": half_points},
    "parameter groups": {"optimizer": groups},
    "batch smaller than the shards": {"global_batch": 3},
    "batch larger than the data": {"global_batch": 500},
    "loader workers": {"workers": 2},
    "compiled": {"model": lambda: torch.compile(with_dropout_and_batchnorm())},
}


def train_feature(team, feature):
    """Train one feature's model; returns the sha256 of its weights and its last loss."""
    torch.manual_seed(3)
    module = feature.get("model", plain)()
    model = team.replicate(module, find_unused=feature.get("find_unused", False))
    optimizer = feature.get("optimizer", adam)(module)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, STEPS) if feature.get("schedule") else None
    batches = team.batches(
        feature.get("data", Points)(),
        global_batch=feature.get("global_batch", 16),
        steps=STEPS,
        split=feature.get("split", "interleaved"),
        accumulate=feature.get("accumulate", 1),
        workers=feature.get("workers", 0),
    )
    loss = math.nan
    for batch in batches:
        loss = team.step(
            model,
            optimizer,
            batch,
            feature.get("loss", F.cross_entropy),
            schedule=schedule,
            clip_norm=feature.get("clip_norm"),
        )
        team.prove(model, optimizer, batch.step)
    return weights_sha256(module), loss


def train_all(names, audit=0.0):
    """Entry point of a rank: every named feature, one after the other, in one team."""
    with dure.start(seed=5, audit=audit) as team:
        return {name: train_feature(team, FEATURES[name]) for name in names}
