"""Points that kill their rank once, in the middle of a run."""

import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

STEP = 5
BATCH = 16
READ_AT_START = 40
"""More than the checks at the start read of any sample set."""


def plain():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))


class Points(Dataset):
    def __init__(self, samples):
        self.points = torch.randn(samples, 6, generator=torch.Generator().manual_seed(7))

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index], int(self.points[index].sum() > 0)


class KilledOnce(Points):
    def __init__(self, folder, rank, samples=64):
        super().__init__(samples)
        self.folder, self.rank, self.read = Path(folder), rank, 0

    def __getitem__(self, index):
        time.sleep(0.02)  # so that loggers have written something by then
        if os.environ.get("RANK") == str(self.rank) and not (self.folder / "killed").exists():
            self.read += 1
            if self.read == READ_AT_START + STEP * BATCH // 2:
                (self.folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def points(**args):
    return KilledOnce(**args)


def still(**args):
    return Points(**args)
