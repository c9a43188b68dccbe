"""A job in which rank 1 is slow in backward alone, by as many seconds as a file says."""

import os
import time
from pathlib import Path

import torch
from torch import nn


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, pace):
        ctx.pace = pace
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        if os.environ.get("RANK") == "1":
            time.sleep(float(Path(ctx.pace).read_text()))
        return gradient, None


class Late(nn.Module):
    def __init__(self, pace):
        super().__init__()
        self.pace = pace
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, batch):
        return self.second(_Late.apply(torch.relu(self.first(batch)), self.pace))


class Points(torch.utils.data.Dataset):
    def __init__(self, count=60):
        draw = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(count, 8, generator=draw)
        self.targets = (self.inputs.sum(dim=1) > 0).long()

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.inputs[index], int(self.targets[index])


JOB = """
name = "late"

[model]
factory = "support.straggling:Late"
args = {{ pace = "{pace}" }}

[data]
factory = "support.straggling:Points"
global_batch = 12

[eval]
factory = "support.straggling:Points"
metrics = ["accuracy"]
every_epochs = 4

[train]
loss = "cross_entropy"
optimizer = "SGD"
lr = 0.1
epochs = 60
prove_every = 20
audit = 0.1

[checkpoint]
every_steps = 40

[team]
ranks = 3
shards = 3
"""
