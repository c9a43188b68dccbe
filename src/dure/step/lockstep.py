"""One replica's step: its shards computed one by one, gradients met in the tree, one update.

Nothing here depends on how many ranks there are but which shards come along.
"""

from __future__ import annotations

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
from dure.data.batches import Batch
from dure.data.seeds import seed_all, seed_of
from dure.observe.heartbeat import Heartbeat, Phase
from dure.step.audit import ShardAudit
from dure.step.first_probe import probe_on
from dure.step.forward import PartLoss, Setting, WholeLoss
from dure.step.refusals import NotFiniteSearch, WrittenWeights, refuse_losses_not_finite
from dure.step.replica import Buffers, ProbeResult, refuse_hooks_on_sums
from dure.step.shadow import Audited, Corruption
from dure.step.shard_passes import ShardPasses
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
        self._awaits_update = False
        self._own_only = False
        self._windows: Windows | None = None
        self._exchange = GradientExchange(
            exchanger, self._stack, wire, lambda: heartbeat.beat(self._step, Phase.EXCHANGE)
        )
        model.register_comm_hook(None, self._exchange.hook)
        alone = (setting.topology.size == 1 or not setting.sync) and not wire.rounds
        self._passes = ShardPasses(model, setting, self._stack, self._exchange, heartbeat, alone=alone)
        self._written_weights = WrittenWeights(model.module)
        self._audit = ShardAudit(model, setting, group, heartbeat)

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
        self._written_weights.begin(self._beside)
        step = self._new_exchange(batch, flags)
        step.watch = self._audit.watch(batch, loss)
        unused = self._passes.compute(batch, loss, step, buffers)
        ended = time.perf_counter()
        self._exchange.finish()
        audited = self._audit.examine(batch, loss, step, buffers)
        if audited is not None and audited.corruption is not None and audited.corruption.in_step:
            buffers.restore()
            if wrong is not None:
                raise audited.corruption.error(self._setting.on_corruption)
            return audited.corruption
        if audited is not None and wrong is not None:
            audited = Audited(audited.chosen, wrong)
        self._written_weights.refuse()
        refuse_losses_not_finite(batch.step, step.totals, self._setting)
        if step.flags & NOT_FINITE:
            NotFiniteSearch(self.model.module, self._setting, self._group).raise_where(batch, loss, buffers)
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
        if any(parameter._post_accumulate_grad_hooks for parameter in self._parameters):
            refuse_hooks_on_sums(self.model.module)  # registered after team.replicate
        self._step = batch.step
        self._stack.clear()
        # A gradient that is not there is taken over as it is computed, without a pass over memory.
        for parameter in self._parameters:
            parameter.grad = None

    def _new_exchange(self, batch: Batch, flags: int) -> StepExchange:
        setting = self._setting
        shape = Pieces.of_step(setting.topology.size, setting.shards, batch.active)
        ranks, rank = (setting.topology.size, setting.topology.rank) if setting.sync else (1, 0)
        totals = StepTotals.empty(setting.shards, ranks)
        totals.flags[rank], totals.steps[rank] = flags, batch.step
        totals.samples, totals.mark = len(batch.ids), batch.mark
        marks = None
        if self._windows is not None:
            marks = self._windows.marks(batch.step, setting.shards, batch.content_mark)
        return StepExchange(shape, None if batch.idle else batch.shards[-1].shard, totals, marks=marks)

    def _take_off_unused(self, unused: set[int]) -> None:
        """No rank's shards used every parameter: find those that none used, and take their zeros off, so that decay
        and momentum leave them alone."""
        used = torch.tensor([at not in unused for at in range(len(self._parameters))], dtype=torch.uint8)
        if self._setting.sync:
            self._group.extreme(used, "sharing which parameters were used", largest=True)
        for parameter, was_used in zip(self._parameters, used.tolist(), strict=True):
            if not was_used:
                parameter.grad = None
