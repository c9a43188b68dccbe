"""Document 001's cat model: three weights, 400 photos, 4 ranks, one step, with the document's numbers.

weights at the start      ear 0.5   whiskers 0.3   eyes 0.2        the same on every rank
rank 0, photos 1-100         +0.1           +0.2       +0.3
rank 1, photos 101-200       +0.2           +0.1       +0.4        each rank's own average
rank 2, photos 201-300       +0.3           +0.3       +0.2
rank 3, photos 301-400       +0.2           +0.2       +0.3
all-reduce: average          +0.2           +0.2       +0.3        the same on every rank
weights after the step        0.7            0.5        0.5        the same on every rank
"""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

UPDATES = torch.tensor([[0.1, 0.2, 0.3], [0.2, 0.1, 0.4], [0.3, 0.3, 0.2], [0.2, 0.2, 0.3]])


class Cat(nn.Module):
    """How much like a cat a photo looks: ear, whiskers and eyes, as visible as each is, times its weight."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.tensor([0.5, 0.3, 0.2]))

    def forward(self, visible: Tensor) -> Tensor:
        return visible @ self.weights


def model() -> nn.Module:
    return Cat()


def photos(seed: int, each: int = 100) -> TensorDataset:
    """Four blocks of `each` photos, all cats. A photo is how visible its ears, whiskers and eyes are.

    Photos differ, but come in pairs, one as much above the block's average as the other is below. So the
    averages are the document's: rank 0 sees mostly eyes, rank 2 more ears.
    """
    dice = torch.Generator().manual_seed(seed)
    visible = torch.empty(len(UPDATES), each // 2, 2, 3)
    more = torch.rand(len(UPDATES), each // 2, 3, generator=dice) * 0.08
    visible[:, :, 0] = UPDATES[:, None] + more
    visible[:, :, 1] = UPDATES[:, None] - more
    return TensorDataset(visible.reshape(-1, 3), torch.ones(len(UPDATES) * each))


def hinge(score: Tensor, is_cat: Tensor) -> Tensor:
    """What each photo's score lacks to 1. Its slope is minus the photo itself: SGD at a rate of 1 adds to the
    weights the average of all photos."""
    return (1 - is_cat * score).clamp(min=0)
