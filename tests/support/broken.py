"""Models and data that go wrong, each in its own way."""

import os
import signal
import sys
import time

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset


class Numbers(Dataset):
    def __init__(self, samples=64):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return torch.full((4,), float(index)), index % 2


def numbers(samples=64):
    return Numbers(samples)


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(4), 0


class Fickle(Numbers):
    """Draws from a generator of its own, which nobody seeds by sample."""

    def __init__(self):
        super().__init__()
        self.dice = torch.Generator()

    def __getitem__(self, index):
        return torch.rand(4, generator=self.dice), 0


def model():
    return nn.Linear(4, 2)


def raising_model():
    raise RuntimeError("no model today")


class At(nn.Module):
    """Does something when a given sample comes by (its number is its value)."""

    def __init__(self, do, sample):
        super().__init__()
        self.inner, self.do, self.sample = nn.Linear(4, 2), do, float(sample)
        self.seen = 0

    def forward(self, numbers):
        self.seen += 1
        if self.seen > 4 and bool((numbers[:, 0] == self.sample).any()):  # after the probe
            self.do()
        return self.inner(numbers)


def act(do):
    """What `At` does, by name."""

    def raising():
        raise ValueError("sample 13 is unlucky")

    def asleep():
        time.sleep(600)

    actions = {
        "raise": raising,
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "exit": lambda: sys.exit(3),
        "sleep": asleep,
    }
    return At(actions[do], 13)


class NotANumber(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.seen = nn.Linear(4, 2), 0

    def forward(self, numbers):
        self.seen += 1
        spoiled = self.seen > 4 and bool((numbers[:, 0] == 13).any())
        return self.inner(numbers) * (float("nan") if spoiled else 1.0)


class Stateful(nn.Module):
    """Counts its calls outside of its buffers."""

    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Linear(4, 2), 0

    def forward(self, numbers):
        self.calls += 1
        return self.inner(numbers) * self.calls


class OwnDice(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.dice = nn.Linear(4, 2), torch.Generator()

    def forward(self, numbers):
        return self.inner(numbers + torch.rand(4, generator=self.dice))


class Talks(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, numbers):
        mean = numbers.mean(0)
        torch.distributed.all_reduce(mean)
        return self.inner(numbers - mean)


class Replaces(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, numbers):
        self.mean = self.mean * 0.9 + numbers.mean(0) * 0.1
        return self.inner(numbers)


class SparseWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(64, 2, sparse=True)

    def forward(self, numbers):
        return self.words(numbers[:, 0].long())


def synchronised():
    return nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4), nn.Linear(4, 2))


def by_the_clock():
    torch.manual_seed(time.time_ns())
    return nn.Linear(4, 2)


class Never(nn.Module):
    """Has weights that it never uses."""

    def __init__(self):
        super().__init__()
        self.inner, self.rare = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, numbers):
        return self.inner(numbers)


def mean_loss(output, target):
    return torch.nn.functional.cross_entropy(output, target)
