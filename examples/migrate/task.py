"""What all scripts of this folder train: a small classifier with dropout, on 1,003 points of three spirals."""

import math

import torch
from torch import nn
from torch.utils.data import TensorDataset


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
    )


def dataset(samples: int = 1003) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    spiral = torch.arange(samples) % 3
    along = torch.rand(samples, generator=draw)
    angle = 2 * math.pi * (along + spiral / 3) + 0.1 * torch.randn(samples, generator=draw)
    return TensorDataset(torch.stack([along * angle.cos(), along * angle.sin()], dim=1), spiral)
