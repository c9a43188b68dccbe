"""Ranks that are slow, or stand still, while they evaluate."""

import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import dure


class Slow(Dataset):
    def __init__(self, seconds, stuck_at=None):
        self.seconds, self.stuck_at = seconds, stuck_at

    def __len__(self):
        return 40

    def __getitem__(self, index):
        time.sleep(600 if index == self.stuck_at else self.seconds)
        return torch.ones(6) * index, index % 2


def evaluate(seconds, stuck_at=None):
    """Entry point of a rank: read every sample in `seconds`, and `stuck_at` never."""
    with dure.start(seed=5, hang_seconds=300) as team:
        model = team.replicate(nn.Linear(6, 2))
        judged = team.evaluate(model, Slow(seconds, stuck_at), {"loss": F.cross_entropy}, batch=8)
        return judged.samples
