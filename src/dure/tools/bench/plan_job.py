"""The step bench's model, data and loss as parts of a job, so that the planner can measure it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dure.tools.bench.contenders import Transformer, sequences
from dure.tools.bench.workload import Workload

JOB = """
name = "bench-step"
[model]
factory = "dure.tools.bench.plan_job:model"
[data]
factory = "dure.tools.bench.plan_job:data"
global_batch = {batch}
[train]
loss = "dure.tools.bench.plan_job:loss"
steps = 100
lr = {lr}
[team]
ranks = 1
shards = {shards}
"""


def job_text(load: Workload) -> str:
    """The job file."""
    return JOB.format(batch=load.global_batch, lr=load.lr, shards=load.shards)


def model() -> nn.Module:
    """The step bench's."""
    return Transformer(Workload())


def data() -> TensorDataset:
    """The step bench's."""
    return sequences(Workload())


def loss(scores: Tensor, following: Tensor) -> Tensor:
    """Of each token."""
    return F.cross_entropy(scores.flatten(0, 1), following.flatten(), reduction="none")
