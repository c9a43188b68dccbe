"""Evaluation: every sample exactly once, whatever the number of ranks, and the same bits in the result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from dure import tree
from dure.batches import Batch
from dure.exchange.group import Group
from dure.lockstep import Setting, forward, inputs_and_target
from dure.loss import LossSum
from dure.replica import Buffers
from dure.seeds import plant, seed_of


@dataclass(frozen=True)
class Judged:
    """Means over the evaluation data."""

    metrics: dict[str, float]
    samples: int
    """Of this rank."""
    mark: int
    """Hash of those samples."""


def evaluate(
    module: torch.nn.Module,
    batches: Iterable[Batch],
    measures: Mapping[str, LossSum],
    setting: Setting,
    group: Group | None,
) -> Judged:
    """Each measure's mean. Sums are kept by shard and folded in tree order, so ranks do not matter."""
    sums = torch.zeros(len(measures), 2, setting.shards, dtype=torch.float64)
    samples = mark = 0
    modes = [(part, part.training) for part in module.modules()]
    # A model may write buffers in eval mode too; every shard starts from the same, and training goes on from there.
    buffers = Buffers(module, [name for name, _ in module.named_buffers()])
    module.eval()
    with torch.no_grad():
        for batch in batches:
            if batch.idle:
                continue
            samples, mark = samples + len(batch.ids), (mark + batch.mark) & (2**64 - 1)
            for shard in batch.shards:
                for part in shard.parts:
                    buffers.restore()
                    plant(seed_of(setting.seed, "eval", batch.step, shard.shard))
                    inputs, target = inputs_and_target(part, setting.device)
                    output = forward(module, inputs, setting)
                    for at, measure in enumerate(measures.values()):
                        total, count = measure(output, target)
                        sums[at, 0, shard.shard] += float(total)
                        sums[at, 1, shard.shard] += count
    buffers.restore()
    # Not module.train(): parts that were put into eval mode (a frozen backbone) stay there.
    for part, was_training in modes:
        part.training = was_training
    if group is not None:
        group.sum(sums, "adding up the evaluation")
    metrics = {}
    for at, name in enumerate(measures):
        whole, over = (tree.tree_sum(sums[at, what].tolist()) for what in range(2))
        metrics[name] = whole / over if over else float("nan")
    return Judged(metrics, samples, mark)
