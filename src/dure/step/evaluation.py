"""Evaluation: every sample exactly once, whatever the number of ranks, and the same bits in the result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dure.base.errors import ModelRefused
from dure.comm import tree
from dure.comm.group import Group
from dure.data.batches import Batch, Batches
from dure.data.seeds import seed_all, seed_of
from dure.device.fingerprint import fingerprint
from dure.step.forward import Setting, forward, inputs_and_target, to_device
from dure.step.gathered import Gathered, Outputs, compute
from dure.step.loss import LossSum
from dure.step.replica import Buffers, refusing_what_is_not_deterministic


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
    values: dict[str, Any] = field(default_factory=dict)
    """What measures over all samples returned, as plain numbers, dicts and lists; `metrics` has their numbers."""


@dataclass(frozen=True)
class Measures:
    """What a model is judged by."""

    means: Mapping[str, LossSum]
    gathered: Mapping[str, Gathered] = field(default_factory=dict)
    """Of all samples' outputs at once."""
    forward: Callable[[Any, Any], tuple[Any, Any]] | None = None
    """(module, micro-batch) -> (output, target); without it, micro-batches are such pairs with the input."""


def evaluate(
    module: torch.nn.Module,
    batches: Iterable[Batch],
    measures: Measures,
    setting: Setting,
    group: Group | None,
) -> EvalResult:
    """Each measure. Sums are kept by shard and folded in tree order, so ranks do not matter."""
    sums = torch.zeros(len(measures.means), 2, setting.shards, dtype=torch.float64)
    outputs = Outputs()
    samples = mark = 0
    with _eval_mode(module) as buffers:
        for batch in batches:
            if batch.idle:
                continue
            samples, mark = samples + len(batch.ids), (mark + batch.mark) & (2**64 - 1)
            for shard in batch.shards:
                for part in shard.parts:  # evaluation does not accumulate: a shard is one part
                    buffers.restore()
                    seed_all(seed_of(setting.seed, "eval", batch.step, shard.shard))
                    output, target = _judged(module, part, measures, setting)
                    for at, measure in enumerate(measures.means.values()):
                        total, count = measure(output, target)
                        sums[at, 0, shard.shard] += float(total)
                        sums[at, 1, shard.shard] += float(count)
                    if measures.gathered:
                        outputs.add(output, target, len(shard.ids))
                if measures.gathered:
                    outputs.add_ids(shard.ids)
    used = torch.tensor(
        [samples, mark >> 32, mark & (2**32 - 1)], dtype=torch.float64
    )  # whole numbers: exact
    if group is not None:
        group.sum(sums, "adding up the evaluation")
        group.sum(used, "adding up the evaluation's samples")
    metrics = {}
    for at, name in enumerate(measures.means):
        whole, over = (tree.tree_sum(sums[at, what].tolist()) for what in range(2))
        metrics[name] = whole / over if over else float("nan")
    values: dict[str, Any] = {}
    if measures.gathered:
        numbers, values = compute(measures.gathered, outputs, setting.seed, group)
        metrics |= numbers
    of_all, high, low = map(int, used.tolist())
    return EvalResult(metrics, samples, mark, of_all, ((high << 32) + low) & (2**64 - 1), values)


@refusing_what_is_not_deterministic()
def rehearse(module: torch.nn.Module, batches: Batches, measures: Measures, setting: Setting) -> None:
    """Judge the first and the smallest micro-batch, and drop the result: what would fail after hours fails now."""
    weights = {name: fingerprint([("", p)]) for name, p in module.named_parameters()}
    with _eval_mode(module) as buffers:
        for part in (batches.common_part(0), batches.smallest_part()):
            buffers.restore()
            try:
                output, target = _judged(module, part, measures, setting)
                for measure in measures.means.values():
                    total, count = measure(output, target)
                    float(total), float(count)
                if measures.gathered:
                    Outputs().add(output, target, len(target))  # the measures themselves may need all samples
            except Exception as error:
                error.add_note("This was a dry run of the evaluation, before the first step.")
                raise
    for name, p in module.named_parameters():
        if fingerprint([("", p)]) != weights[name]:
            raise ModelRefused(
                f"the evaluation writes the parameter {name}, so how often a run is evaluated would change its bits; "
                "write it after the step, or make it a buffer (register_buffer)"
            )


def _judged(module: torch.nn.Module, part: object, measures: Measures, setting: Setting) -> tuple[Any, Any]:
    """A micro-batch's output and target."""
    if measures.forward is not None:
        found = measures.forward(module, to_device(part, setting.device))
        if not isinstance(found, tuple) or len(found) != 2:
            raise ModelRefused("forward, in an evaluation, must return the pair (output, target)")
        return found
    inputs, target = inputs_and_target(part, setting.device)
    return forward(module, inputs, setting), target


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
