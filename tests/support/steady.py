"""A job whose pace is a file in its storage: slow while a test breaks something, fast when it has seen enough."""

import time
from pathlib import Path

import torch


def model():
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 4)
    )


class Paced(torch.utils.data.Dataset):
    def __init__(self, pace, count):
        draw = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(count, 16, generator=draw)
        self.targets = torch.randint(0, 4, (count,), generator=draw)
        self.pace = Path(pace)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        time.sleep(float(self.pace.read_text()))
        return self.inputs[index], int(self.targets[index])


def samples(pace, count=512):
    return Paced(pace, count)
