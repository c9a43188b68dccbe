"""The forward and backward passes of one rank's shards: each alone, seeded by its own place."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch
from torch.nn.parallel import DistributedDataParallel

from dure.comm.reduce.hook import GradientExchange, StepExchange
from dure.comm.reduce.subtree_stack import SubtreeStack
from dure.data.batches import Batch
from dure.data.seeds import seed_all, seed_of
from dure.observe.heartbeat import Heartbeat, Phase
from dure.step.forward import PartLoss, Setting, WholeLoss, compute_loss
from dure.step.loss import SumAndCount
from dure.step.own_mean import OwnMean
from dure.step.replica import Buffers
from dure.step.unused import complete, not_reached, refuse_frozen


@contextlib.contextmanager
def synchronised(model: DistributedDataParallel) -> Iterator[None]:
    """The opposite of `model.no_sync()`: a script that is inside of it would train apart without a word."""
    before, model.require_backward_grad_sync = model.require_backward_grad_sync, True
    try:
        yield
    finally:
        model.require_backward_grad_sync = before


def as_inside_ddp(model: DistributedDataParallel, loss: PartLoss) -> contextlib.AbstractContextManager[None]:
    """What forward passes run in. The compiler cuts a model where DDP's buckets end if it runs inside of DDP, and
    then it must on every shard, wherever it is computed."""
    if isinstance(loss, WholeLoss):
        return contextlib.nullcontext()
    inside: contextlib.AbstractContextManager[None] = model._inside_ddp_forward()
    return inside


class ShardPasses:
    """Computes a rank's shards one by one; their gradients go to the stack, the last one's to DDP's buckets."""

    def __init__(
        self,
        model: DistributedDataParallel,
        setting: Setting,
        stack: SubtreeStack,
        exchange: GradientExchange,
        heartbeat: Heartbeat,
        *,
        alone: bool,
    ) -> None:
        """`alone`: this rank exchanges nothing."""
        self.model = model
        self._setting = setting
        self._stack = stack
        self._exchange = exchange
        self._heartbeat = heartbeat
        self._parameters = [p for p in model.module.parameters() if p.requires_grad]
        self._own_mean = OwnMean(self._parameters, stack) if alone else None

    def compute(self, batch: Batch, loss: PartLoss, step: StepExchange, buffers: Buffers) -> set[int]:
        """Forward and backward of all shards. Returns the positions of parameters that none of them used."""
        with as_inside_ddp(self.model, loss):
            unused = self._compute(batch, loss, step, buffers)
        if self._own_mean is not None:
            refuse_frozen(self._parameters, unused)
            self._own_mean.settle(step, all_used=not unused)
            step.handed_over_at = time.perf_counter()
        return unused

    def _compute(self, batch: Batch, loss: PartLoss, step: StepExchange, buffers: Buffers) -> set[int]:
        setting, totals, beat = self._setting, step.totals, self._heartbeat.beat
        last = batch.shards[-1]
        unused: set[int] | None = None
        for at, shard in enumerate(batch.shards):
            if at:
                buffers.restore()
            for micro, part in enumerate(shard.parts):
                meets = shard is last and self._own_mean is None and micro == len(shard.parts) - 1
                beat(batch.step, Phase.COMPUTE)
                seed_all(micro_seed(setting.seed, batch.step, micro, shard.shard, loss))
                if meets:
                    total, count = self._loss_by_ddp(part, loss)
                else:
                    total, count = compute_loss(self.model.module, part, loss, setting)
                if not batch.idle:
                    totals.note(shard.shard, total, count)
                if meets:
                    unused = self._backward_and_meet(total, step, unused)
                elif total.requires_grad:
                    total.backward()
            if not at:
                buffers.keep()
            if shard is not last or self._own_mean is not None:
                unused = self._put_away(batch, at, step, unused)
        return unused or set()

    def _put_away(
        self, batch: Batch, at: int, step: StepExchange, unused: set[int] | None
    ) -> set[int] | None:
        """A shard's gradients, out of the next one's way. `unused` are the positions that no shard before used."""
        shard, apart = batch.shards[at].shard, set[int]()
        for watch in step.watches:
            wanted = watch.wants(self._parameters)
            seen = [self._parameters[place] for place in wanted]
            watch.note(shard, seen, [parameter.grad for parameter in seen])
            apart.update(wanted)
        # Onto a shard that leaves its gradients in DDP's buckets, nothing is added here.
        if at + 1 < len(batch.shards) - (self._own_mean is None):
            parts = len(batch.shards[at + 1].parts)
            if self._stack.hold(shard, batch.active, parts, apart):
                return unused
        without = self._stack.push(shard, batch.active)
        return without if unused is None else unused & without

    def _loss_by_ddp(self, part: object, loss: PartLoss) -> SumAndCount:
        """The loss of the micro-batch with which ranks meet: with what DDP does around its forward pass, so that its
        reducer expects the backward pass. A function over the micro-batch may call any method of the module, several
        times."""
        with synchronised(self.model):
            self.model._pre_forward()
            total, count = compute_loss(self.model.module, part, loss, self._setting)
            self.model._post_forward(total)
        return total, count

    def _backward_and_meet(
        self, total: torch.Tensor, step: StepExchange, unused: set[int] | None
    ) -> set[int]:
        """The backward pass whose buckets DDP hands over. `unused` are the positions that no shard before used."""
        self._exchange.begin(step)
        try:
            if total.requires_grad:
                total.backward()
            if step.complete:
                return set()
            missing = not_reached(total, self._parameters)
            without = {at for at in missing if self._parameters[at].grad is None}
            unused = without if unused is None else unused & without
            step.all_used = not unused
            complete(self._parameters, missing)
            return unused
        except RuntimeError:
            self._exchange.raise_failure()  # DDP wraps what the hook raised; show the hook's own words
            raise


def micro_seed(seed: int, step: int, micro: int, shard: int, loss: PartLoss) -> int:
    """Of one micro-batch. A second loss of the same batch (a GAN's other half) draws other numbers than the first."""
    again = ("pass", loss.number) if isinstance(loss, WholeLoss) and loss.number else ()
    return seed_of(seed, "shard", step, micro, shard, *again)
