"""The model and the data of this project. Replace both by your own; job.toml and train.py name these functions."""

import math

import torch
from torch import nn
from torch.utils.data import TensorDataset

CLASSES = 3


def model() -> nn.Module:
    """A small network; its first weights come from the run's seed."""
    return nn.Sequential(
        nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES)
    )


def spirals(samples: int, seed: int) -> TensorDataset:
    """Points on three spirals, and which spiral each is on. Whoever asks gets the same points: they have a seed."""
    draw = torch.Generator().manual_seed(seed)
    spiral = torch.arange(samples) % CLASSES
    along = torch.rand(samples, generator=draw)
    angle = 2 * math.pi * (along + spiral / CLASSES) + 0.1 * torch.randn(samples, generator=draw)
    points = torch.stack([along * angle.cos(), along * angle.sin()], dim=1)
    return TensorDataset(points, spiral)
