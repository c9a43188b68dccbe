"""What `dure bench checkpoint` trains: a transformer of about 100 million parameters on very little data."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

VOCABULARY = 19_000
LENGTH = 16


class Transformer(nn.Module):
    """Embedding, blocks, and an output that shares the embedding's weights."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        heads = max(1, width // 64)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.out = nn.Linear(width, VOCABULARY, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Scores of the next word, words last but one."""
        hidden = self.embedding(words)
        for block in self.blocks:
            hidden = block(hidden)
        scores: torch.Tensor = self.out(hidden)
        return scores.transpose(1, 2)


def model(width: int = 768, layers: int = 12) -> nn.Module:
    """About 100 million parameters, unless told otherwise."""
    return Transformer(width, layers)


def data(samples: int) -> TensorDataset:
    """Sentences that count upwards."""
    start = torch.randint(VOCABULARY, (samples, 1), generator=torch.Generator().manual_seed(1))
    words = (start + torch.arange(LENGTH + 1)) % VOCABULARY
    return TensorDataset(words[:, :-1], words[:, 1:])
