"""What a step may not do, found while it runs: write weights in the forward pass, give numbers that are not finite."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import torch

from dure.base.errors import ModelRefused, NotFinite
from dure.comm.group import Group
from dure.comm.reduce.step_totals import StepTotals
from dure.data.batches import Batch
from dure.data.seeds import seed_all
from dure.data.shards import rank_of_shard
from dure.device.fingerprint import fingerprint
from dure.step.forward import PartLoss, Setting, compute_loss
from dure.step.replica import Buffers
from dure.step.shard_passes import micro_seed


class WrittenWeights:
    """Notices a forward pass that writes weights."""

    def __init__(self, module: torch.nn.Module) -> None:
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._watched: list[torch.nn.Parameter] = []
        self._versions: list[int] = []
        self._bits: list[str] | None = None
        self._steps = 0

    def begin(self, beside: Sequence[torch.nn.Module]) -> None:
        """At the start of a step; `beside` are models that the loss uses too."""
        self._steps += 1
        self._watched = [*self._parameters, *(p for module in beside for p in module.parameters())]
        self._versions = [parameter._version for parameter in self._watched]
        # Once after an update: what writes weights in the forward pass may have found nothing to do before.
        self._bits = self._bits_now() if self._steps == 2 else None

    def refuse(self) -> None:
        """After the step's backward passes."""
        written = next(
            (
                at
                for at, (p, v) in enumerate(zip(self._watched, self._versions, strict=True))
                if p._version != v
            ),
            None,
        )
        if written is None and self._bits is not None:
            pairs = zip(self._bits, self._bits_now(), strict=True)
            written = next((at for at, (before, after) in enumerate(pairs) if before != after), None)
        if written is not None:
            name = self._names[written] if written < len(self._names) else "of another model"
            raise ModelRefused(
                f"the forward pass writes the parameter {name}: once per shard, so the bits would "
                "depend on how many a rank computes. Make it a buffer (register_buffer), or write it after the step"
            )

    def _bits_now(self) -> list[str]:
        return [fingerprint([("", parameter)]) for parameter in self._parameters]


def refuse_losses_not_finite(step: int, totals: StepTotals, setting: Setting) -> None:
    """Raise NotFinite, on all ranks alike, naming the first shard whose loss is not finite."""
    for shard, loss in enumerate(totals.losses):
        if not math.isfinite(loss):
            rank = rank_of_shard(shard, setting.topology.size, setting.shards)
            raise NotFinite(
                f"the loss is {loss} at step {step}, in shard {shard} (rank {rank}); try a smaller train.lr "
                "or train.clip_norm, and look at that shard's samples"
            )


class NotFiniteSearch:
    """Finds where a mean gradient that is not finite began."""

    def __init__(self, module: torch.nn.Module, setting: Setting, group: Group) -> None:
        self._module = module
        self._setting = setting
        self._group = group

    def raise_where(self, batch: Batch, loss: PartLoss, buffers: Buffers) -> None:
        """All ranks know that a mean gradient is not finite: compute the shards again, and name where it began."""
        found = None if batch.idle else self._first(batch, loss, buffers)
        told = self._group.gather(json.dumps(found), "looking for what is not finite")
        everyones = [json.loads(text) for text in told] if self._setting.sync else [found]
        where = [(*one, rank) for rank, one in enumerate(everyones) if one is not None]
        if not where:
            words = "the sum of the shards' gradients overflows"
        else:
            shard, name, ids, rank = min(where)
            samples = ", ".join(map(str, ids[:8])) + (", …" if len(ids) > 8 else "")
            words = f"the gradient of {name} is not finite in shard {shard} (rank {rank}, samples {samples})"
        raise NotFinite(
            f"{words} at step {batch.step}, though the loss is finite; the weights are not updated. Look for a "
            "division by zero, a root or a logarithm of zero, or an overflow in the model"
        )

    def _first(self, batch: Batch, loss: PartLoss, buffers: Buffers) -> tuple[int, str, list[int]] | None:
        setting = self._setting
        named = [(name, p) for name, p in self._module.named_parameters() if p.requires_grad]
        parameters = [parameter for _, parameter in named]
        for shard in batch.shards:
            buffers.restore()
            sums: list[torch.Tensor | None] = [None] * len(parameters)
            for micro, part in enumerate(shard.parts):
                seed_all(micro_seed(setting.seed, batch.step, micro, shard.shard, loss))
                total, _ = compute_loss(self._module, part, loss, setting)
                gradients = torch.autograd.grad(total, parameters, allow_unused=True)
                for at, gradient in enumerate(gradients):
                    if gradient is not None:
                        before = sums[at]
                        sums[at] = gradient if before is None else before + gradient
            for (name, _), summed in zip(named, sums, strict=True):
                if summed is not None and not bool(summed.isfinite().all()):
                    return shard.shard, name, list(shard.ids)
        return None
