"""The forward and backward passes of one rank's shards: each alone, seeded by its own place."""

from __future__ import annotations

import contextlib
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
from dure.step.replica import Buffers
from dure.step.unused import complete, not_reached


@contextlib.contextmanager
def synchronised(model: DistributedDataParallel) -> Iterator[None]:
    """The opposite of `model.no_sync()`: a script that is inside of it would train apart without a word."""
    before, model.require_backward_grad_sync = model.require_backward_grad_sync, True
    try:
        yield
    finally:
        model.require_backward_grad_sync = before


class ShardPasses:
    """Computes a rank's shards one by one; their gradients go to the stack, the last one's to DDP's buckets."""

    def __init__(
        self,
        model: DistributedDataParallel,
        setting: Setting,
        stack: SubtreeStack,
        exchange: GradientExchange,
        heartbeat: Heartbeat,
    ) -> None:
        self.model = model
        self._setting = setting
        self._stack = stack
        self._exchange = exchange
        self._heartbeat = heartbeat
        self._parameters = [p for p in model.module.parameters() if p.requires_grad]

    def compute(self, batch: Batch, loss: PartLoss, step: StepExchange, buffers: Buffers) -> set[int]:
        """Forward and backward of all shards. Returns the positions of parameters that none of them used."""
        setting, last = self._setting, batch.shards[-1]
        unused: set[int] | None = None
        for shard in batch.shards:
            if shard is not batch.shards[0]:
                buffers.restore()
            for micro, part in enumerate(shard.parts):
                meets = shard is last and micro == len(shard.parts) - 1
                self._heartbeat.beat(batch.step, Phase.COMPUTE)
                seed_all(micro_seed(setting.seed, batch.step, micro, shard.shard, loss))
                with synchronised(self.model) if meets else self.model.no_sync():
                    total, count = self._loss_of(part, loss)
                    if not batch.idle:
                        step.totals.losses[shard.shard] += float(total.detach())
                        step.totals.counts[shard.shard] += count
                    if meets:
                        unused = self._backward_and_meet(total, step, unused)
                    elif total.requires_grad:
                        total.backward()
            if shard is batch.shards[0]:
                buffers.keep()
            if shard is not last:
                if step.marks is not None:
                    step.marks.note(shard.shard, self._parameters, [p.grad for p in self._parameters])
                without = self._stack.push(shard.shard, batch.active)
                unused = without if unused is None else unused & without
        return unused or set()

    def _loss_of(self, part: object, loss: PartLoss) -> SumAndCount:
        """The loss of a micro-batch, by way of DDP, so that its reducer expects the backward pass."""
        if not isinstance(loss, WholeLoss):
            return compute_loss(self.model, part, loss, self._setting)
        # The function may call any method of the module, several times: what DDP does around its forward pass is done
        # around all of it. Under no_sync it does nothing.
        self.model._pre_forward()
        total, count = loss.of(self.model.module, part, self._setting)
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
