"""A model whose memory loses the last bit of one weight, once, while `flip` is in its folder; on every rank alike."""

from pathlib import Path

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, folder, step):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 5))
        self.register_buffer("done", torch.zeros(1))
        self.folder, self.step, self.flipped = Path(folder), step, False

    def forward(self, x):
        if not self.flipped and int(self.done) == self.step and (self.folder / "flip").exists():
            self.flipped = True
            self.layers[2].weight.data.view(-1)[7:8].view(torch.int32).bitwise_xor_(1)
        self.done += self.training
        return self.layers(x)


def model(folder, step):
    return Net(folder, step)
