"""A job that trains for ever, until its rank 1 is told, by a file, to compute for ever in one step."""

import os

import torch
from torch import nn
from torch.utils.data import Dataset


class Numbers(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((4,), float(index)), index % 2


class Spins(nn.Module):
    def __init__(self, when):
        super().__init__()
        self.inner, self.when = nn.Linear(4, 2), when

    def forward(self, numbers):
        if torch.distributed.get_rank() == 1 and os.path.exists(self.when):
            while True:
                pass
        return self.inner(numbers)


def data():
    return Numbers()


def model(when):
    return Spins(when)
