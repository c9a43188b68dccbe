"""One replica's step: its shards computed one by one, gradients met in the tree, one update.

Nothing here depends on how many ranks there are but which shards come along.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from dure import tree
from dure.batches import Batch
from dure.errors import JobError, ModelRefused, NotFinite
from dure.exchange.group import Group
from dure.loss import LossSum, SumAndCount
from dure.pulse import Phase, Pulse
from dure.reduce.exchanger import Exchanger, Pieces, Wire
from dure.reduce.hook import GradientExchange, StepExchange, StepTotals
from dure.reduce.stack import SubtreeStack
from dure.replica import Buffers, ProbeResult, probe
from dure.seeds import plant, seed_of
from dure.shards import rank_of_shard, shards_of_rank
from dure.update import UsedParameters, clip, put_back


@dataclass(frozen=True)
class Setting:
    """What a step depends on besides the model and the data."""

    rank: int
    ranks: int
    shards: int
    seed: int
    sync: bool
    device: torch.device
    precision: str = "fp32"
    deadline_seconds: float = 150.0
    """How long a rank waits for another."""


@dataclass(frozen=True)
class Outcome:
    """What came of a forward and backward pass."""

    loss: float
    """Mean over the global batch, folded in tree order."""
    compute_seconds: float
    exchange_seconds: float
    """Time this rank only waited for the exchange to end."""
    wishes: int
    """What any rank asked for in this step (bits): the same on all ranks."""


class Lockstep:
    """Steps one replica in step with the others."""

    def __init__(
        self,
        model: DistributedDataParallel,
        setting: Setting,
        exchanger: Exchanger,
        wire: Wire,
        group: Group,
        pulse: Pulse,
        *,
        find_unused: bool,
        known: ProbeResult | None = None,
    ) -> None:
        self.model = model
        self._setting = setting
        self._group = group
        self._pulse = pulse
        self._parameters = [p for p in model.module.parameters() if p.requires_grad]
        self._used = UsedParameters(self._parameters) if find_unused else None
        self._known = known
        self._buffers: Buffers | None = None
        self._stack = SubtreeStack(self._parameters, keep_gradients=find_unused)
        self._step = 0
        self._exchange = GradientExchange(
            exchanger, self._stack, wire, lambda: pulse.beat(self._step, Phase.EXCHANGE)
        )
        model.register_comm_hook(None, self._exchange.hook)

    def prepare(self, batch: Batch, loss: LossSum) -> None:
        """Before the first step: probe the model on this rank's first shard, unless that was done."""
        if self._buffers is not None:
            return
        known = self._known
        if known is None:
            known = probe_on(self.model.module, batch, loss, self._setting).with_others(self._group)
        if known.unused and self._used is None:
            raise ModelRefused(
                f"the parameter {known.unused[0]} takes no part in the loss ({len(known.unused)} in all); freeze it "
                "(requires_grad=False), or say that parameters may be unused: find_unused=True"
            )
        self._buffers = Buffers(self.model.module, known.written)

    def forward_backward(self, batch: Batch, loss: LossSum, wish: int = 0) -> Outcome:
        """Compute this rank's shards and meet the others; `.grad` then holds the batch's mean gradient.

        `wish` are bits that all ranks shall know of after the step; they travel with the losses.
        """
        setting, buffers = self._setting, self._buffers
        assert buffers is not None, "prepare comes first"
        began = time.perf_counter()
        self._step = batch.step
        self._start_anew()
        buffers.begin()
        step = self._new_exchange(batch, wish)
        last = batch.shards[-1]
        for shard in batch.shards:
            if shard is not batch.shards[0]:
                buffers.restore()
            for micro, part in enumerate(shard.parts):
                meets = shard is last and micro == len(shard.parts) - 1
                self._pulse.beat(batch.step, Phase.COMPUTE)
                plant(seed_of(setting.seed, "shard", batch.step, micro, shard.shard))
                with contextlib.nullcontext() if meets else self.model.no_sync():
                    total, count = compute_loss(self.model, part, loss, setting)
                    if not batch.idle:
                        step.totals.losses[shard.shard] += float(total.detach())
                        step.totals.counts[shard.shard] += count
                    self._backward(total, step if meets else None)
            if shard is batch.shards[0]:
                buffers.keep()
            if shard is not last:
                self._refuse_unused(batch, shard.shard)
                self._stack.push(shard.shard, batch.active)
        ended = time.perf_counter()
        self._exchange.finish()
        if not step.complete:
            self._refuse_unused(batch, last.shard)
        buffers.settle(self._group if setting.sync else None)
        self._refuse_not_finite(batch, step.totals)
        mean = tree.tree_sum(step.totals.losses[: batch.active]) * step.scale
        wishes = reduce(or_, map(int, step.totals.wishes))
        return Outcome(mean, step.handed_over_at - began, ended - step.handed_over_at, wishes)

    def update(
        self,
        optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
        clip_norm: float | None = None,
    ) -> float | None:
        """Apply the gradients; every rank does the same, with the same bits. Returns the norm, if clipped."""
        self._pulse.beat(self._step, Phase.UPDATE)
        hidden = []
        if self._used is not None:
            if self._setting.sync:
                self._group.extreme(self._used.used, "sharing which parameters were used", largest=True)
            hidden = self._used.hide_unused()
        norm = clip(self._parameters, clip_norm)
        if norm is not None and not math.isfinite(norm):
            put_back(hidden)
            raise NotFinite(
                f"the gradients' norm is {norm} at step {self._step}, though the loss is finite; the weights are not "
                "updated. Look for a division by zero, a root or a logarithm of zero, or an overflow in the model"
            )
        plant(seed_of(self._setting.seed, "update", self._step))  # for optimizers that draw random numbers
        optimizer.step()
        if schedule is not None:
            schedule.step()
        put_back(hidden)
        return norm

    def say(self, phase: Phase) -> None:
        """Tell whoever watches what this rank does now, in the current step."""
        self._pulse.beat(self._step, phase)

    def close(self) -> None:
        """End the communication thread."""
        self._exchange.close()

    def _new_exchange(self, batch: Batch, wish: int) -> StepExchange:
        setting = self._setting
        shape = Pieces.of_step(setting.ranks, setting.shards, batch.active)
        nothing = StepTotals([0.0] * setting.shards, [0.0] * setting.shards, [0.0] * setting.shards)
        nothing.wishes[shards_of_rank(setting.rank, setting.ranks, setting.shards).start] = float(wish)
        return StepExchange(shape, None if batch.idle else batch.shards[-1].shard, nothing)

    def _backward(self, total: torch.Tensor, step: StepExchange | None) -> None:
        if step is None:
            total.backward()
            return
        self._exchange.begin(step)
        try:
            total.backward()
        except RuntimeError:
            self._exchange.raise_failure()  # DDP wraps what the hook raised; show the hook's own words
            raise

    def _start_anew(self) -> None:
        """Forget all that stands in the gradients and in the stack: an earlier step that was not applied or that
        failed, another model's loss, the user's own backward pass. It would be added once a rank.

        A gradient that is not there is taken over as it is computed, without a pass over memory. But DDP and
        the stack need a tensor for every parameter, so where one may stay unused there are zeros.
        """
        self._stack.clear()
        if self._used is None:
            for parameter in self._parameters:
                parameter.grad = None
            return
        self._used.used.zero_()
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        torch._foreach_zero_([p.grad for p in self._parameters if p.grad is not None])

    def _refuse_not_finite(self, batch: Batch, totals: StepTotals) -> None:
        for shard, loss in enumerate(totals.losses):
            if not math.isfinite(loss):
                rank = rank_of_shard(shard, self._setting.ranks, self._setting.shards)
                raise NotFinite(
                    f"the loss is {loss} at step {batch.step}, in shard {shard} (rank {rank}); try a smaller train.lr "
                    "or train.clip_norm, and look at that shard's samples"
                )

    def _refuse_unused(self, batch: Batch, shard: int) -> None:
        """Without `find_unused`, every parameter must have a gradient after every shard."""
        named = self.model.module.named_parameters()
        unused = [name for name, parameter in named if parameter.requires_grad and parameter.grad is None]
        if unused and not batch.idle:
            raise ModelRefused(
                f"{unused[0]} was not used in step {batch.step}, shard {shard}, though all parameters were at the "
                "start; say that some may be unused: model.find_unused = true (in a script: find_unused=True)"
            )


def probe_on(module: torch.nn.Module, batch: Batch, loss: LossSum, setting: Setting) -> ProbeResult:
    """Probe a model on this rank's first micro-batch, with all its others (or another seed) in between: so
    that what all ranks learn together does not depend on how many they are."""
    first, *others = [part for shard in batch.shards for part in shard.parts]

    def computed(part: object, seed: int) -> torch.Tensor:
        plant(seed)
        return compute_loss(module, part, loss, setting)[0]

    here, there = (seed_of(setting.seed, "probe", place) for place in range(2))
    return probe(
        module, partial(computed, first, here), [partial(computed, o, there) for o in others or [first]]
    )


def compute_loss(module: torch.nn.Module, part: object, loss: LossSum, setting: Setting) -> SumAndCount:
    """The loss of one micro-batch, as sum and count."""
    inputs, target = inputs_and_target(part, setting.device)
    output = forward(module, inputs, setting)
    return loss(output, target)


def forward(module: torch.nn.Module, inputs: Any, setting: Setting) -> Any:
    """Call the model with a batch's input: one tensor, several (tuple, list), or named ones (dict)."""
    low = setting.precision == "bf16"
    with torch.autocast(setting.device.type, dtype=torch.bfloat16) if low else contextlib.nullcontext():
        try:
            if isinstance(inputs, dict):
                return module(**inputs)
            if isinstance(inputs, list | tuple):
                return module(*inputs)
            return module(inputs)
        except Exception as error:
            if type(error).__name__ != "FailOnRecompileLimitHit":  # importing its module takes a second
                raise
            raise ModelRefused(
                "torch.compile met more shapes than it may compile for, and would run the others uncompiled, with "
                "other bits; pad the samples to fewer shapes, or set torch._dynamo.config.recompile_limit higher"
            ) from error


def inputs_and_target(part: object, device: torch.device) -> tuple[Any, Any]:
    """A batch's two halves, on the device."""
    if not isinstance(part, list | tuple) or len(part) != 2:
        raise JobError(
            f"a batch is a {type(part).__name__}; the dataset's samples must be pairs (input, target), "
            "or data.collate must make them so"
        )
    inputs, target = part
    return _to(inputs, device), _to(target, device)


def _to(value: Any, device: torch.device) -> Any:
    if device.type == "cpu":
        return value
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: _to(inner, device) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_to(inner, device) for inner in value]
    return value
