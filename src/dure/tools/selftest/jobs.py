"""Small jobs that ranks train in a self-test: a transformer with dropout, a CNN with BatchNorm, one in bf16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

SAMPLES = 33
"""With batches of 16 the last step has one sample: all ranks but one are idle in it."""
BATCH = 16


class Sentences(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows of words, each the next one's input."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        words = torch.arange(9) * (index + 3) % 23
        return words[:-1], words[1:]


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """Noise around three means."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(3, 8, 8) + index % 3, index % 3


class Transformer(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, 23)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """(samples × words) rows of scores."""
        scores: torch.Tensor = self.head(self.layer(self.embed(words)))
        return scores.flatten(0, 1)


def cnn() -> nn.Module:
    """Convolution and BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 3)
    )


def of_words(scores: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Each word's loss."""
    return F.cross_entropy(scores.float(), words.flatten(), reduction="none")


def of_pictures(scores: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """Each picture's loss."""
    return F.cross_entropy(scores.float(), kinds, reduction="none")


@dataclass(frozen=True)
class SmallJob:
    """What is trained, on what, how."""

    model: Callable[[], nn.Module]
    dataset: Callable[[], Dataset[Any]]
    loss: Callable[[Any, Any], torch.Tensor]
    in_bf16: bool = False


JOBS = {
    "transformer": SmallJob(Transformer, Sentences, of_words),
    "cnn": SmallJob(cnn, Pictures, of_pictures),
    "bf16": SmallJob(Transformer, Sentences, of_words, in_bf16=True),
}


class InBf16(nn.Module):
    """Computes a model's forward pass in bf16."""

    def __init__(self, inner: nn.Module, kind: str) -> None:
        super().__init__()
        self.inner = inner
        self._kind = kind

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The inner model's."""
        with torch.autocast(self._kind, dtype=torch.bfloat16):
            out: torch.Tensor = self.inner(*inputs)
        return out
