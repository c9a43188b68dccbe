"""Models and data of the lesson's runs; small, so that a chapter's button answers in seconds."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

FEATURES = ("ear", "whiskers", "eyes")
SHOWS = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.7, 0.7, 0.0]])
"""By block of 100 photos: which features tell cats from others there. Each rank sees one block, as in document 003."""


class Cat(nn.Module):
    """Three weights, as in document 001: how much ears, whiskers and eyes speak for a cat."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor([0.5, 0.3, 0.2]))

    def forward(self, visible: Tensor) -> Tensor:
        """The score of each photo; above 0 means cat."""
        return visible @ self.weights


def cat() -> nn.Module:
    """The model of document 001."""
    return Cat()


def photos(seed: int, each: int = 100) -> TensorDataset:
    """Four blocks of photos, half of them cats. A photo is three numbers: how cat-like each feature looks."""
    draw = torch.Generator().manual_seed(seed)
    is_cat = (torch.arange(len(SHOWS) * each) % 2).float() * 2 - 1
    blocks = torch.arange(len(SHOWS)).repeat_interleave(each)
    noise = torch.randn(len(is_cat), len(FEATURES), generator=draw)
    return TensorDataset(is_cat[:, None] * SHOWS[blocks] + 0.9 * noise, is_cat)


def logistic(score: Tensor, is_cat: Tensor) -> Tensor:
    """One loss per photo."""
    return nn.functional.softplus(-is_cat * score)


def right(score: Tensor, is_cat: Tensor) -> Tensor:
    """1 for each photo that is judged right."""
    return (torch.sign(score) == is_cat).float()


def wide(width: int = 512) -> nn.Module:
    """Enough arithmetic for a step to be measured."""
    return nn.Sequential(
        nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


class Drawn(Dataset[tuple[Tensor, Tensor]]):
    """Points and their classes; `pace` is how many seconds a sample takes to read."""

    def __init__(self, samples: int, seed: int, pace: float) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.points = torch.randn(samples, 256, generator=draw)
        self.classes = self.points[:, :10].argmax(dim=1)
        self.pace = pace

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.pace:
            time.sleep(self.pace)
        return self.points[index], self.classes[index]


def drawn(samples: int = 2048, seed: int = 1, pace: float = 0.0) -> Drawn:
    """Data for `wide`."""
    return Drawn(samples, seed, pace)
