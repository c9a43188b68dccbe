"""Evaluation: every sample exactly once, whatever the number of ranks, and the same bits in the result."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from dure.base.errors import ModelRefused
from dure.comm import tree
from dure.comm.group import Group
from dure.data.batches import Batch, Batches
from dure.data.seeds import seed_all, seed_of
from dure.device.fingerprint import fingerprint
from dure.step.lockstep import Setting, forward, inputs_and_target
from dure.step.loss import LossSum, SumAndCount
from dure.step.replica import Buffers


@dataclass(frozen=True)
class EvalResult:
    """Means over the evaluation data."""

    metrics: dict[str, float]
    samples: int
    """Of this rank."""
    mark: int
    """Hash of those samples."""
    samples_of_all: int
    """Of all ranks."""
    mark_of_all: int


def evaluate(
    module: torch.nn.Module,
    batches: Iterable[Batch],
    measures: Mapping[str, LossSum],
    setting: Setting,
    group: Group | None,
) -> EvalResult:
    """Each measure's mean. Sums are kept by shard and folded in tree order, so ranks do not matter."""
    sums = torch.zeros(len(measures), 2, setting.shards, dtype=torch.float64)
    samples = mark = 0
    with _eval_mode(module) as buffers:
        for batch in batches:
            if batch.idle:
                continue
            samples, mark = samples + len(batch.ids), (mark + batch.mark) & (2**64 - 1)
            for shard in batch.shards:
                for part in shard.parts:
                    buffers.restore()
                    seed_all(seed_of(setting.seed, "eval", batch.step, shard.shard))
                    for at, (total, count) in enumerate(_measured(module, part, measures, setting)):
                        sums[at, 0, shard.shard] += float(total)
                        sums[at, 1, shard.shard] += count
    used = torch.tensor(
        [samples, mark >> 32, mark & (2**32 - 1)], dtype=torch.float64
    )  # whole numbers: exact
    if group is not None:
        group.sum(sums, "adding up the evaluation")
        group.sum(used, "adding up the evaluation's samples")
    metrics = {}
    for at, name in enumerate(measures):
        whole, over = (tree.tree_sum(sums[at, what].tolist()) for what in range(2))
        metrics[name] = whole / over if over else float("nan")
    of_all, high, low = map(int, used.tolist())
    return EvalResult(metrics, samples, mark, of_all, ((high << 32) + low) & (2**64 - 1))


def rehearse(
    module: torch.nn.Module, batches: Batches, measures: Mapping[str, LossSum], setting: Setting
) -> None:
    """Judge the first and the smallest micro-batch, and drop the result: what would fail after hours fails now."""
    weights = {name: fingerprint([("", p)]) for name, p in module.named_parameters()}
    with _eval_mode(module) as buffers:
        for part in (batches.common_part(0), batches.smallest_part()):
            buffers.restore()
            try:
                for total, count in _measured(module, part, measures, setting):
                    float(total), float(count)
            except Exception as error:
                error.add_note("This was a dry run of the evaluation, before the first step.")
                raise
    for name, p in module.named_parameters():
        if fingerprint([("", p)]) != weights[name]:
            raise ModelRefused(
                f"the evaluation writes the parameter {name}, so how often a run is evaluated would change its bits; "
                "write it after the step, or make it a buffer (register_buffer)"
            )


def _measured(
    module: torch.nn.Module, part: object, measures: Mapping[str, LossSum], setting: Setting
) -> Iterator[SumAndCount]:
    inputs, target = inputs_and_target(part, setting.device)
    output = forward(module, inputs, setting)
    for measure in measures.values():
        yield measure(output, target)


@contextlib.contextmanager
def _eval_mode(module: torch.nn.Module) -> Iterator[Buffers]:
    """Within `with`, the model is judged; afterwards it is as before, part by part."""
    modes = [(part, part.training) for part in module.modules()]
    # A model may write buffers in eval mode too; every shard starts from the same, and training goes on from there.
    buffers = Buffers(module, [name for name, _ in module.named_buffers()])
    module.eval()
    try:
        with torch.no_grad():
            yield buffers
    finally:
        buffers.restore()
        # Not module.train(): parts that were put into eval mode (a frozen backbone) stay there.
        for part, was_training in modes:
            part.training = was_training
