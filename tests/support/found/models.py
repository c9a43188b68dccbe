"""Models that once broke the promise, each in its own way."""

import torch
from torch import nn


class Plain(nn.Module):
    """Wide enough for buckets that ranks share in place, but in fp16, which would overflow."""

    def __init__(self, dtype):
        super().__init__()
        wide = 64 if dtype == torch.float16 else 160
        self.n = nn.Sequential(
            nn.Linear(16, wide), nn.GELU(), nn.Linear(wide, wide), nn.GELU(), nn.Linear(wide, 5)
        ).to(dtype)
        self.dtype = dtype

    def forward(self, x):
        return self.n(x.to(self.dtype)).float()


def plain(dtype="float32"):
    return Plain(getattr(torch, dtype))


class Mixed(nn.Module):
    """An fp64 layer and a bf16 layer with the same number of weights."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 32).double()
        self.c, self.out = nn.Linear(32, 32).bfloat16(), nn.Linear(32, 5)

    def forward(self, x):
        hidden = self.b(self.a(x).relu().double()).relu()
        return self.out(self.c(hidden.bfloat16()).float().relu())


class Branch(nn.Module):
    """A layer that the first batches do not use."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 5), nn.Linear(16, 5)

    def forward(self, x):
        return self.a(x) + self.b(x) if x[:, 0].max() > 2.5 else self.a(x)


class Extra(nn.Module):
    """A layer that micro-batches without a large number leave out."""

    def __init__(self, limit=-2.0):
        super().__init__()
        self.n, self.extra, self.limit = nn.Linear(16, 5), nn.Linear(16, 5), limit

    def forward(self, x):
        y = self.n(x)
        return y + self.extra(x) if (x[:, 0] > self.limit).any() else y


class Experts(nn.Module):
    """Each sample takes one of many layers, so every shard leaves others out; one is never taken."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 16)
        self.experts = nn.ModuleList(nn.Linear(16, 5) for _ in range(7))

    def forward(self, x):
        h = torch.tanh(self.gate(x))
        choice = (h.sum(1) * 3).long().abs() % 6
        out = torch.zeros(len(x), 5)
        for at, expert in enumerate(self.experts):
            taken = choice == at
            if taken.any():
                out = out.index_put((taken.nonzero()[:, 0],), expert(h[taken]))
        return out


def frozen_backbone():
    """Fine-tuning: the factory puts the frozen backbone into eval mode (no dropout in it)."""
    backbone = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.5)).requires_grad_(False)
    backbone.eval()
    return nn.Sequential(backbone, nn.Linear(64, 5))


def with_batch_norm():
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 5))


class Root(nn.Module):
    """A finite loss, and a NaN gradient for a sample of zeros (the root of 0)."""

    def __init__(self):
        super().__init__()
        self.n, self.s = nn.Linear(16, 5), nn.Linear(16, 1, bias=False)

    def forward(self, x):
        return self.n(x) + 0.1 * torch.sqrt(self.s(x) ** 2)


def one_number(output, target):
    """A metric that is no mean."""
    return (output.argmax(1) == target).float().mean()
