"""One replica's step: its shards computed one by one, gradients met in the tree, one update.

Nothing here depends on how many ranks there are but which shards come along.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from dure.base.errors import ModelRefused, NotFinite, UsageError
from dure.comm import tree
from dure.comm.group import Group
from dure.comm.reduce.exchanger import ALL_USED, NOT_FINITE, Exchanger, Pieces, Wire
from dure.comm.reduce.gradient_marks import GradientMarks, Windows
from dure.comm.reduce.hook import GradientExchange, OwnPlaces, StepExchange
from dure.comm.reduce.step_totals import StepTotals
from dure.comm.reduce.subtree_stack import SubtreeStack
from dure.data.batches import Batch, content_mark
from dure.data.seeds import seed_all, seed_of
from dure.data.shards import rank_of_shard
from dure.device.fingerprint import fingerprint
from dure.observe.heartbeat import Heartbeat, Phase
from dure.step.first_probe import probe_on
from dure.step.forward import PartLoss, Setting, WholeLoss, compute_loss
from dure.step.loss import SumAndCount
from dure.step.replica import Buffers, ProbeResult
from dure.step.shadow import Audited, Chosen, Computed, Corruption, OwnShard, chosen, compare
from dure.step.unused import complete, not_reached
from dure.step.update import clip


@dataclass(frozen=True)
class StepResult:
    """What came of a forward and backward pass."""

    loss: float
    """Mean over the global batch, folded in tree order."""
    compute_seconds: float
    exchange_seconds: float
    """Time this rank had nothing to do but the exchange: from its last bucket until all are added."""
    wait_seconds: float
    """Of those, the time that it waited for other ranks; the one that comes last waits least."""
    flags: int
    """What any rank asked for in this step (bits): the same on all ranks."""
    samples: int
    """Of all ranks; of this one when sync is off."""
    mark: int
    """Hash of those samples (see `ledger`)."""
    totals: StepTotals
    """Losses and counts by shard."""
    marks: GradientMarks | None = None
    """Fingerprints of the shards' gradients and contents, if asked for (`mark_gradients`)."""
    audited: Audited | None = None
    """The shard that another rank computed again, and whether the bits were the same; where not, the step's own
    gradients were computed again."""


class Steps(Protocol):
    """A schedule: torch's, or any object that is stepped once after each update."""

    def step(self) -> Any:
        """Once per optimizer step."""
        ...


class Lockstep:
    """Steps one replica in step with the others."""

    def __init__(
        self,
        model: DistributedDataParallel,
        setting: Setting,
        exchanger: Exchanger,
        wire: Wire,
        group: Group,
        heartbeat: Heartbeat,
        *,
        find_unused: bool,
        known: ProbeResult | None = None,
    ) -> None:
        self.model = model
        self._setting = setting
        self._group = group
        self._heartbeat = heartbeat
        self._find_unused = find_unused
        self._names = [name for name, p in model.module.named_parameters() if p.requires_grad]
        self._parameters = [p for p in model.module.parameters() if p.requires_grad]
        self._frozen = [(name, p) for name, p in model.module.named_parameters() if not p.requires_grad]
        self._known = known
        self._buffers: Buffers | None = None
        self._written: set[str] = set()
        """Buffers that any loss was seen to write."""
        self._beside: list[torch.nn.Module] = []
        """Other models that losses use, in the order of their numbers in those names."""
        self._probed: set[object] = set()
        """Functions over whole micro-batches that the model was probed with."""
        self._stack = SubtreeStack(self._parameters)
        self._step = 0
        self._steps_begun = 0
        self._awaits_update = False
        self._own_only = False
        self._windows: Windows | None = None
        self._exchange = GradientExchange(
            exchanger, self._stack, wire, lambda: heartbeat.beat(self._step, Phase.EXCHANGE)
        )
        model.register_comm_hook(None, self._exchange.hook)

    def prepare(self, batch: Batch, loss: PartLoss) -> None:
        """Before the first step: probe the model on this rank's first shard, unless that was done."""
        if not isinstance(batch, Batch):
            raise UsageError(
                f"a step takes a batch of team.batches, not a {type(batch).__name__}; give the dataset (not a "
                "DataLoader) to team.batches(dataset, global_batch=..., epochs=...)"
            )
        if self._buffers is not None and (not isinstance(loss, WholeLoss) or loss.written_as in self._probed):
            return
        if isinstance(loss, WholeLoss):
            self._probed.add(loss.written_as)
            self._beside += [other for other in loss.beside if all(other is not one for one in self._beside)]
            loss = replace(loss, beside=tuple(self._beside))  # whose numbers stay theirs
        known = self._known if self._buffers is None else None
        if known is None:
            known = probe_on(self.model.module, batch, loss, self._setting, self._group)
        if known.unused and not self._find_unused:
            raise ModelRefused(
                f"the parameter {known.unused[0]} takes no part in the loss ({len(known.unused)} in all); freeze it "
                "(requires_grad=False), or say that parameters may be unused: find_unused=True"
            )
        self._written |= set(known.written)
        self._buffers = Buffers(self.model.module, self._written, self._beside)

    def forward_backward(self, batch: Batch, loss: PartLoss, flags: int = 0) -> StepResult:
        """Compute this rank's shards and meet the others; `.grad` then holds the batch's mean gradient, or None
        where no shard of any rank used the parameter.

        `flags` are OR-ed over ranks in the loss reduction. A step that a shadow shard shows to be wrong is computed
        again, once; raises ComputedWrongly where it is wrong again.
        """
        first = self._forward_backward(batch, loss, flags, None)
        if isinstance(first, StepResult):
            return first
        again = self._forward_backward(batch, loss, flags, first)
        assert isinstance(again, StepResult)
        return again

    def _forward_backward(
        self, batch: Batch, loss: PartLoss, flags: int, wrong: Corruption | None
    ) -> StepResult | Corruption:
        """One computation of a step; `wrong` is what is known of the one before. Returns what is wrong with it."""
        buffers = self._buffers
        assert buffers is not None, "prepare comes first"
        began = time.perf_counter()
        self._begin(batch)
        buffers.begin()
        beside = [parameter for module in self._beside for parameter in module.parameters()]
        versions = [parameter._version for parameter in (*self._parameters, *beside)]
        # Once after an update: what writes weights in the forward pass may have found nothing to do before.
        bits = self._weights() if self._steps_begun == 2 else None
        step = self._new_exchange(batch, loss, flags)
        unused = self._compute(batch, loss, step, buffers)
        ended = time.perf_counter()
        self._exchange.finish()
        audited = self._audit(batch, loss, step, buffers)
        if audited is not None and audited.corruption is not None and audited.corruption.in_step:
            buffers.restore()
            if wrong is not None:
                raise audited.corruption.error(self._setting.on_corruption)
            return audited.corruption
        if audited is not None and wrong is not None:
            audited = Audited(audited.chosen, wrong)
        self._refuse_written_weights(beside, versions, bits)
        self._refuse_not_finite(batch, step.totals)
        if step.flags & NOT_FINITE:
            self._raise_not_finite(batch, loss, buffers)
        buffers.settle(self._group if self._setting.sync else None)
        if not step.flags & ALL_USED:
            self._take_off_unused(unused)
        self._awaits_update = True
        mean = tree.tree_sum(step.totals.losses[: batch.active]) * step.scale
        asked = reduce(or_, step.totals.flags)
        return StepResult(
            mean,
            step.handed_over_at - began,
            ended - step.handed_over_at,
            self._exchange.waited_after(step.handed_over_at),
            asked,
            step.totals.samples,
            step.totals.mark,
            step.totals,
            step.marks,
            audited,
        )

    def update(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        schedules: Sequence[Steps] = (),
        clip_norm: float | None = None,
    ) -> float | None:
        """Apply the gradients; every rank does the same, with the same bits. Returns the norm, if clipped."""
        self._heartbeat.beat(self._step, Phase.UPDATE)
        self._awaits_update = False
        if clip_norm is not None and self._own_only:
            raise UsageError(
                "clip_norm needs the norm of all gradients, but each rank has those of its part alone; shard the "
                "optimizer with own_gradients=False"
            )
        norm = clip(self._parameters, clip_norm)
        if norm is not None and not math.isfinite(norm):
            raise NotFinite(
                f"the gradients' norm is {norm} at step {self._step}, though the gradients are finite; the weights are "
                "not updated. Look for an overflow in the model"
            )
        seed_all(seed_of(self._setting.seed, "update", self._step))  # for optimizers that draw random numbers
        for optimizer in optimizers:
            optimizer.step()
        for schedule in schedules:
            schedule.step()
        return norm

    def discard(self) -> None:
        """Give up the gradients of the last `forward_backward`: no update follows."""
        self._awaits_update = False

    def keep_own(self, own_places: OwnPlaces) -> None:
        """From now on, exchange only what this rank needs of the gradients for its part of the update."""
        self._own_only = True
        self._exchange.keep_own(own_places)

    def mark_gradients(self) -> None:
        """From now on, each step's result has fingerprints of its shards' gradients; all ranks must ask for it."""
        self._windows = Windows(self._parameters)

    def say(self, phase: Phase) -> None:
        """Tell whoever watches what this rank does now, in the current step."""
        self._heartbeat.beat(self._step, phase)

    def close(self) -> None:
        """End the communication thread."""
        self._beside.clear()
        self._exchange.close()

    def _begin(self, batch: Batch) -> None:
        """Forget all that stands in the gradients and in the stack: an earlier step that failed, another model's
        loss, the user's own backward pass. It would be added once per rank."""
        if self._awaits_update and batch.step != self._step:  # the same batch may be computed again
            raise UsageError(
                f"forward_backward of step {batch.step}, but the gradients of step {self._step} were not used yet and "
                "would be lost; call team.update in between (or team.step for both), team.discard to give them up, or "
                "ask for larger batches in parts: team.batches(..., accumulate=N)"
            )
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise UsageError(
                    f"{name} was unfrozen after team.replicate, so its gradient would not be exchanged; unfreeze it "
                    "before, or replicate the module again"
                )
        self._step = batch.step
        self._steps_begun += 1
        self._stack.clear()
        # A gradient that is not there is taken over as it is computed, without a pass over memory.
        for parameter in self._parameters:
            parameter.grad = None

    def _compute(self, batch: Batch, loss: PartLoss, step: StepExchange, buffers: Buffers) -> set[int]:
        """Forward and backward of all shards. Returns the positions of parameters that none of them used."""
        setting, last = self._setting, batch.shards[-1]
        unused: set[int] | None = None
        for shard in batch.shards:
            if shard is not batch.shards[0]:
                buffers.restore()
            for micro, part in enumerate(shard.parts):
                meets = shard is last and micro == len(shard.parts) - 1
                self._heartbeat.beat(batch.step, Phase.COMPUTE)
                seed_all(_seed(setting.seed, batch.step, micro, shard.shard, loss))
                with contextlib.nullcontext() if meets else self.model.no_sync():
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
                for watch in step.watches:
                    seen = [self._parameters[at] for at in watch.wants(self._parameters)]
                    watch.note(shard.shard, seen, [parameter.grad for parameter in seen])
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

    def _new_exchange(self, batch: Batch, loss: PartLoss, flags: int) -> StepExchange:
        setting = self._setting
        shape = Pieces.of_step(setting.topology.size, setting.shards, batch.active)
        ranks, rank = (setting.topology.size, setting.topology.rank) if setting.sync else (1, 0)
        totals = StepTotals.empty(setting.shards, ranks)
        totals.flags[rank], totals.steps[rank] = flags, batch.step
        totals.samples, totals.mark = len(batch.ids), batch.mark
        marks = None
        if self._windows is not None:
            marks = self._windows.marks(batch.step, setting.shards, batch.content_mark)
        step = StepExchange(shape, None if batch.idle else batch.shards[-1].shard, totals, marks=marks)
        asked = self._chosen(batch, loss)
        if asked is not None and asked.owner == rank:
            step.watch = OwnShard(asked.shard, self._parameters)
        return step

    def _chosen(self, batch: Batch, loss: PartLoss) -> Chosen | None:
        """The shard of this step that another rank computes again, if any."""
        setting = self._setting
        if not setting.audit or not setting.sync:
            return None
        number = loss.number if isinstance(loss, WholeLoss) else 0
        ranks = setting.topology.size
        return chosen(setting.seed, setting.audit, batch.step, number, batch.active, ranks, setting.shards)

    def _audit(self, batch: Batch, loss: PartLoss, step: StepExchange, buffers: Buffers) -> Audited | None:
        """Where it is due: have a shard computed again and compare; a collective call."""
        asked = self._chosen(batch, loss)
        if asked is None:
            return None

        def own() -> Computed:
            assert isinstance(step.watch, OwnShard)
            summed = step.totals.losses[asked.shard]
            return Computed(batch.content_mark_of(asked.shard), summed, step.watch.gradients())

        found = compare(
            self._group,
            asked,
            self._names,
            own,
            lambda: self._compute_again(batch, asked.shard, loss, buffers),
        )
        return Audited(asked, found)

    def _compute_again(self, batch: Batch, number: int, loss: PartLoss, buffers: Buffers) -> Computed:
        """Any shard of this step, as its owner computes it; gradients and what becomes of buffers stay as they are."""
        kept = [parameter.grad for parameter in self._parameters]
        shard, contents = batch.source.shard_again(batch.step, number)
        for parameter in self._parameters:
            parameter.grad = None
        buffers.restore()
        summed = 0.0
        self._heartbeat.beat(batch.step, Phase.COMPUTE)
        for micro, part in enumerate(shard.parts):
            seed_all(_seed(self._setting.seed, batch.step, micro, number, loss))
            # Not by way of DDP: its first forward pass after a synchronised one may be a collective call.
            total, _ = compute_loss(self.model.module, part, loss, self._setting)
            summed += float(total.detach())
            if total.requires_grad:
                total.backward()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        for parameter, gradient in zip(self._parameters, kept, strict=True):
            parameter.grad = gradient
        return Computed(content_mark(shard.ids, contents), summed, gradients)

    def _take_off_unused(self, unused: set[int]) -> None:
        """No rank's shards used every parameter: find those that none used, and take their zeros off, so that decay
        and momentum leave them alone."""
        used = torch.tensor([at not in unused for at in range(len(self._parameters))], dtype=torch.uint8)
        if self._setting.sync:
            self._group.extreme(used, "sharing which parameters were used", largest=True)
        for parameter, was_used in zip(self._parameters, used.tolist(), strict=True):
            if not was_used:
                parameter.grad = None

    def _weights(self) -> list[str]:
        return [fingerprint([("", parameter)]) for parameter in self._parameters]

    def _refuse_written_weights(
        self, beside: list[torch.nn.Parameter], versions: list[int], bits: list[str] | None
    ) -> None:
        now = [parameter._version for parameter in (*self._parameters, *beside)]
        written = next((at for at, version in enumerate(now) if version != versions[at]), None)
        if written is None and bits is not None:
            pairs = zip(bits, self._weights(), strict=True)
            written = next((at for at, (before, after) in enumerate(pairs) if before != after), None)
        if written is not None:
            name = self._names[written] if written < len(self._names) else "of another model"
            raise ModelRefused(
                f"the forward pass writes the parameter {name}: once per shard, so the bits would "
                "depend on how many a rank computes. Make it a buffer (register_buffer), or write it after the step"
            )

    def _refuse_not_finite(self, batch: Batch, totals: StepTotals) -> None:
        for shard, loss in enumerate(totals.losses):
            if not math.isfinite(loss):
                rank = rank_of_shard(shard, self._setting.topology.size, self._setting.shards)
                raise NotFinite(
                    f"the loss is {loss} at step {batch.step}, in shard {shard} (rank {rank}); try a smaller train.lr "
                    "or train.clip_norm, and look at that shard's samples"
                )

    def _raise_not_finite(self, batch: Batch, loss: PartLoss, buffers: Buffers) -> None:
        """All ranks know that a mean gradient is not finite: compute the shards again, and name where it began."""
        found = None if batch.idle else self._first_not_finite(batch, loss, buffers)
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

    def _first_not_finite(
        self, batch: Batch, loss: PartLoss, buffers: Buffers
    ) -> tuple[int, str, list[int]] | None:
        setting = self._setting
        for shard in batch.shards:
            buffers.restore()
            sums: list[torch.Tensor | None] = [None] * len(self._parameters)
            for micro, part in enumerate(shard.parts):
                seed_all(_seed(setting.seed, batch.step, micro, shard.shard, loss))
                total, _ = compute_loss(self.model.module, part, loss, setting)
                gradients = torch.autograd.grad(total, self._parameters, allow_unused=True)
                for at, gradient in enumerate(gradients):
                    if gradient is not None:
                        before = sums[at]
                        sums[at] = gradient if before is None else before + gradient
            for name, summed in zip(self._names, sums, strict=True):
                if summed is not None and not bool(summed.isfinite().all()):
                    return shard.shard, name, list(shard.ids)
        return None


def _seed(seed: int, step: int, micro: int, shard: int, loss: PartLoss) -> int:
    """Of one micro-batch. A second loss of the same batch (a GAN's other half) draws other numbers than the first."""
    again = ("pass", loss.number) if isinstance(loss, WholeLoss) and loss.number else ()
    return seed_of(seed, "shard", step, micro, shard, *again)
