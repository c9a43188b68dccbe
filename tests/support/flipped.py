"""A model whose memory loses the last bit of one weight, once, while `flip` is in its folder; on every rank alike.

While `flip-spare` is there, it is a weight that neither the loss nor a gradient depends on."""

from pathlib import Path

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, folder, step):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 5))
        self.register_buffer("done", torch.zeros(1))
        self.spare = nn.Parameter(torch.linspace(0, 1, 9), requires_grad=False)
        self.folder, self.step, self.flipped = Path(folder), step, False

    def forward(self, x):
        if not self.flipped and int(self.done) == self.step:
            for name, weight in (("flip", self.layers[2].weight), ("flip-spare", self.spare)):
                if (self.folder / name).exists():
                    self.flipped = True
                    weight.data.view(-1)[7:8].view(torch.int32).bitwise_xor_(1)
        self.done += self.training
        return self.layers(x)


def model(folder, step):
    return Net(folder, step)
