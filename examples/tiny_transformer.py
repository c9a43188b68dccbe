"""A small causal transformer that learns to count: by ones, twos, threes… as each sequence's start shows.

Sequences have different lengths, so ranks see different numbers of tokens: the loss is a sum and a count,
and the average over the whole batch is right whoever computed which part.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

TOKENS = 24
PADDING = 0


class TinyTransformer(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, dropout: float, longest: int):
        super().__init__()
        self.token = nn.Embedding(TOKENS + 1, width, padding_idx=PADDING)
        self.place = nn.Embedding(longest, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 2 * width, dropout, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, TOKENS + 1)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        # Causal, and padding comes last: no token ever looks at padding.
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.token(tokens) + self.place(torch.arange(length, device=tokens.device))
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.out(self.norm(x))


def model(width=48, layers=2, heads=4, dropout=0.1, longest=16) -> nn.Module:
    return TinyTransformer(width, layers, heads, dropout, longest)


def counting(seed: int, sequences: int = 1003, longest: int = 16) -> TensorDataset:
    """Sequences of 6 to `longest` tokens counting by 1 to 4, round and round; the answer is what follows."""
    dice = torch.Generator().manual_seed(seed)
    start = torch.randint(TOKENS, (sequences, 1), generator=dice)
    stride = torch.randint(1, 5, (sequences, 1), generator=dice)
    length = torch.randint(6, longest + 1, (sequences, 1), generator=dice)
    places = torch.arange(longest + 1)
    tokens = (start + stride * places) % TOKENS + 1
    inputs = tokens[:, :-1].masked_fill(places[:-1] >= length, PADDING)
    answers = tokens[:, 1:].masked_fill(places[:-1] >= length, PADDING)
    return TensorDataset(inputs, answers)


def token_loss(scores: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over all real tokens, and how many there are."""
    total = F.cross_entropy(scores.flatten(0, 1), answers.flatten(), ignore_index=PADDING, reduction="sum")
    return total, (answers != PADDING).sum()
