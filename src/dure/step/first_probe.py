"""The start-up probe on the batches of a run: which micro-batches it computes, and with which seeds."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from dure.base.errors import DureError, ModelRefused
from dure.comm.group import Group
from dure.data.batches import Batch
from dure.data.seeds import seed_all, seed_of
from dure.step.dataset_check import sample_bits
from dure.step.forward import PartLoss, Setting, WholeLoss, compute_loss
from dure.step.replica import ProbeResult, probe


def probe_on(
    module: torch.nn.Module, batch: Batch, loss: PartLoss, setting: Setting, group: Group
) -> ProbeResult:
    """Probe a model on this rank's part of a batch, on samples that all ranks read, and on the smallest micro-batch
    of an epoch; a collective call. What it tells does not depend on the number of ranks."""
    first, *others = [part for shard in batch.shards for part in shard.parts]
    same = batch.source.common_part(batch.step)

    def computed(part: object, seed: int) -> torch.Tensor:
        seed_all(seed)
        return compute_loss(module, part, loss, setting)[0]

    def smallest(seed: int) -> torch.Tensor:
        try:
            return computed(batch.source.smallest_part(), seed)
        except Exception as error:
            raise _too_small(batch, error) from error

    here, there = (seed_of(setting.seed, "probe", place) for place in range(2))
    found, bits = probe(
        module,
        partial(computed, first, here),
        [*(partial(computed, other, there) for other in others or [first]), partial(smallest, there)],
        partial(computed, same, here),
        loss.beside if isinstance(loss, WholeLoss) else (),
    )
    return replace(found, common=(sample_bits(same), bits)).with_others(group)


def _too_small(batch: Batch, error: Exception) -> DureError:
    """A failure with the smallest micro-batch, though a larger one went well."""
    if isinstance(error, DureError):
        return error
    plan = batch.source.plan
    shard, _, size = plan.smallest
    split = plan.split
    words = (
        f"a micro-batch of {size} sample(s) fails ({type(error).__name__}: {error}): shard {shard} of an epoch's last "
        f"step, which has {split.batch_size(split.steps - 1)} of {split.global_batch} samples"
    )
    if split.batch_size(split.steps - 1) < split.global_batch and split.steps > 1:
        left_out = split.samples % split.global_batch
        return ModelRefused(
            f"{words}. Leave such steps out (data.drop_last = true, in a script drop_last=True; {left_out} of "
            f"{split.samples} samples then take no part in an epoch), or choose a data.global_batch that divides "
            f"{split.samples} with a larger rest"
        )
    return ModelRefused(f"{words}. Use a larger data.global_batch, or fewer team.shards")
