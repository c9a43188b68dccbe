"""A machine whose memory changes a weight of one rank, once, and code that somebody edits in the middle of a run."""

import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

SCALE = 1.0


class Net(nn.Module):
    """At its `after`-th training pass the rank `flips` changes a weight; `passes` later, the rank `dies` is killed."""

    def __init__(self, folder, flips, dies, after, passes):
        super().__init__()
        self.n = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 5))
        self.folder, self.flips, self.dies = Path(folder), flips, dies
        self.after, self.passes, self.calls = after, passes, 0

    def forward(self, x):
        self.calls += 1
        rank = int(os.environ.get("RANK", "0"))
        if self.calls == self.after and rank == self.flips and self._once("flipped"):
            self.n[2].weight.data[3, 0] += 0.5
        if self.calls == self.after + self.passes and rank == self.dies and self._once("died"):
            os.kill(os.getpid(), signal.SIGKILL)
        return self.n(x) * SCALE

    def _once(self, what):
        """Whether it shall happen, and has not happened yet."""
        try:
            (self.folder / what).rename(self.folder / f"{what}-it")
        except FileNotFoundError:
            return False
        return True


def model(folder, flips=-1, dies=-1, after=60, passes=4):
    return Net(folder, flips, dies, after, passes)


def data(n=600):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 16, generator=generator)
    return TensorDataset(x, (x @ torch.randn(16, 5, generator=generator)).argmax(1))
