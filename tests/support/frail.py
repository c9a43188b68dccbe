"""The demo's photos, for a host on which every rank from number 2 on is killed as soon as the run is under way."""

import os
import signal
from pathlib import Path

from torch.utils.data import Dataset

from dure.tools.demo import cats

HEALTHY_SAMPLES = 100


class Frail(Dataset):
    def __init__(self, inner, sign):
        self.inner = inner
        self.sign = Path(sign)
        self.rank = int(os.environ["RANK"])
        self.read = 0

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, at):
        self.read += 1
        if self.rank == 0 and self.read == HEALTHY_SAMPLES:
            self.sign.touch()
        if self.rank >= 2 and self.sign.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return self.inner[at]


def photos(sign, **arguments):
    return Frail(cats.photos(**arguments), sign)
