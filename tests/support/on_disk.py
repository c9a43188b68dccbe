"""A dataset whose samples are read from one file at every access, and can be changed there."""

from pathlib import Path

import torch


class Numbers(torch.utils.data.Dataset):
    def __init__(self, file, noise):
        self.file, self.noise = Path(file), noise

    def __len__(self):
        return len(self.file.read_text().split())

    def __getitem__(self, at):
        value = float(self.file.read_text().split()[at])
        return torch.full((3,), value) + self.noise * torch.rand(3), torch.tensor([value / 2])


def numbers(file, noise=0.0):
    return Numbers(file, noise)


def model():
    return torch.nn.Linear(3, 1)
