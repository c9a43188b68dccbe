"""A small CNN with BatchNorm that tells stripes, bars and checks apart in noisy 16×16 pictures.

BatchNorm keeps running statistics (buffers) beside its weights: replicas must agree on those too.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

PATTERNS = ("stripes", "bars", "checks")


def model(channels: int = 12) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * channels, len(PATTERNS)),
    )


def pictures(seed: int, count: int = 805, noise: float = 1.0) -> TensorDataset:
    """`count` pictures: waves across, waves down or both, shifted at random, half hidden by noise."""
    dice = torch.Generator().manual_seed(seed)
    label = torch.randint(len(PATTERNS), (count,), generator=dice)
    shift = torch.randint(4, (2, count, 1, 1), generator=dice)
    rows, columns = torch.arange(16).view(1, 16, 1), torch.arange(16).view(1, 1, 16)
    across = ((rows + shift[0]) // 2 % 2 * 2 - 1).float().expand(count, 16, 16)
    down = ((columns + shift[1]) // 2 % 2 * 2 - 1).float().expand(count, 16, 16)
    picture = torch.stack([across, down, across * down])[label, torch.arange(count)]
    picture = picture + noise * torch.randn(count, 16, 16, generator=dice)
    return TensorDataset(picture.unsqueeze(1), label)
