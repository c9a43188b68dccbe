"""Data for `models`."""

import torch
from torch.utils.data import TensorDataset


def data(n=600, zero_at=None, small=()):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 16, generator=generator)
    y = (x @ torch.randn(16, 5, generator=generator)).argmax(1)
    if zero_at is not None:
        x[zero_at] = 0
    if small:
        x.clamp_(-1.5, 1.5)
        x[list(small), 0] = -5.0
    return TensorDataset(x, y)
