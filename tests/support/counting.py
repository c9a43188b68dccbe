"""A job whose ranks write down how many files they have open while they train."""

import os
from pathlib import Path

import torch


def model():
    return torch.nn.Linear(8, 4)


class Counting(torch.utils.data.Dataset):
    def __init__(self, folder):
        draw = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(64, 8, generator=draw)
        self.targets = torch.randint(0, 4, (64,), generator=draw)
        self.folder = Path(folder)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        path = self.folder / os.environ["RANK"]
        now = len(os.listdir("/proc/self/fd"))
        before = int(path.read_text()) if path.exists() else 0
        path.write_text(str(max(now, before)))
        return self.inputs[index], int(self.targets[index])


def samples(folder):
    return Counting(folder)
