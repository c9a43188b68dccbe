"""One rank's part in audits: keeps its own shard's gradients where it is asked to, computes other ranks' shards."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from dure.comm.group import Group
from dure.comm.reduce.hook import StepExchange
from dure.data.batches import Batch, content_mark
from dure.data.seeds import seed_all
from dure.observe.heartbeat import Heartbeat, Phase
from dure.step.forward import PartLoss, Setting, WholeLoss, compute_loss
from dure.step.replica import Buffers
from dure.step.shadow import Audited, Chosen, Computed, OwnShard, chosen, compare
from dure.step.shard_passes import as_inside_ddp, micro_seed


class ShardAudit:
    """Of one replica."""

    def __init__(
        self, model: DistributedDataParallel, setting: Setting, group: Group, heartbeat: Heartbeat
    ) -> None:
        named = [(name, p) for name, p in model.module.named_parameters() if p.requires_grad]
        self._model = model
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._setting = setting
        self._group = group
        self._heartbeat = heartbeat

    def watch(self, batch: Batch, loss: PartLoss) -> OwnShard | None:
        """What is to see this rank's gradients in a step; None where none of its shards is computed again."""
        asked = self._chosen(batch, loss)
        if asked is None or asked.owner != self._setting.topology.rank:
            return None
        return OwnShard(asked.shard, self._parameters)

    def examine(self, batch: Batch, loss: PartLoss, step: StepExchange, buffers: Buffers) -> Audited | None:
        """Where it is due: have a shard computed again and compare; a collective call."""
        asked = self._chosen(batch, loss)
        if asked is None:
            return None

        def own() -> Computed:
            assert isinstance(step.watch, OwnShard)
            summed = step.totals.losses[asked.shard]
            return Computed(batch.content_mark_of(asked.shard), summed, step.watch.gradients())

        def again() -> Computed:
            return self._compute(batch, asked.shard, loss, buffers)

        return Audited(asked, compare(self._group, asked, self._names, own, again))

    def _chosen(self, batch: Batch, loss: PartLoss) -> Chosen | None:
        setting = self._setting
        if not setting.audit or not setting.sync:
            return None
        number = loss.number if isinstance(loss, WholeLoss) else 0
        ranks = setting.topology.size
        return chosen(setting.seed, setting.audit, batch.step, number, batch.active, ranks, setting.shards)

    def _compute(self, batch: Batch, number: int, loss: PartLoss, buffers: Buffers) -> Computed:
        """Any shard of this step, as its owner computes it. `.grad` is afterwards what it was; what stands in buffers
        is not, and set by whoever settles them."""
        kept = [parameter.grad for parameter in self._parameters]
        shard, contents = batch.source.shard_again(batch.step, number)
        for parameter in self._parameters:
            parameter.grad = None
        buffers.restore()
        summed = 0.0
        self._heartbeat.beat(batch.step, Phase.COMPUTE)
        for micro, part in enumerate(shard.parts):
            seed_all(micro_seed(self._setting.seed, batch.step, micro, number, loss))
            # Not by way of DDP: its first forward pass after a synchronised one may be a collective call.
            with as_inside_ddp(self._model, loss):
                total, _ = compute_loss(self._model.module, part, loss, self._setting)
            summed += float(total.detach())
            if total.requires_grad:
                total.backward()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        for parameter, gradient in zip(self._parameters, kept, strict=True):
            parameter.grad = gradient
        return Computed(content_mark(shard.ids, contents), summed, gradients)
