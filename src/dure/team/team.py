"""This rank's place in the team, and what it does together with the others."""

from __future__ import annotations

import atexit
import gc
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from dure.base.errors import Resumable, UsageError
from dure.checkpoint.state import Part, Sharing
from dure.comm.call_board import CallBoard
from dure.comm.group import Group, node_group
from dure.comm.reduce.exchanger import Exchanger
from dure.comm.reduce.factory import ExchangerFactory
from dure.comm.sharded_optimizer import ShardedUpdate, handover_within, refuse_what_cannot_be_sharded
from dure.comm.topology import Topology
from dure.data.batches import Batch, Batches, BatchPlan
from dure.data.shards import Split, SplitKind
from dure.observe.heartbeat import Heartbeat, Phase
from dure.observe.results import Apart
from dure.proof.verify_replicas import how_far_apart, prove_same
from dure.step.dataset_check import check_dataset
from dure.step.evaluation import EvalResult, evaluate, rehearse
from dure.step.lockstep import Lockstep, Setting, StepResult
from dure.step.loss import LossSum, as_sum
from dure.step.replica import (
    ProbeResult,
    refuse_what_cannot_be_exact,
    same_start,
    wrap,
)
from dure.team.checkpoint import Checkpoint, Wanted
from dure.weights.load import How
from dure.weights.load_group import LoadContext
from dure.weights.loader import Loader, Model

Loss = Callable[[Any, Any], Any] | Literal["cross_entropy", "mse"]


@dataclass(frozen=True)
class _Sharded:
    """An optimizer that ranks hold in parts, and those ranks."""

    optimizer: torch.optim.Optimizer
    ranks: Group
    update: ShardedUpdate


class Team:
    """This rank's place in the team, and everything it does together with the others."""

    def __init__(
        self,
        topology: Topology,
        setting: Setting,
        threads: int,
        heartbeat: Heartbeat,
        calls: CallBoard,
        exchangers: ExchangerFactory,
    ) -> None:
        self.topology = topology
        self.setting = setting
        self.threads = threads
        self.heartbeat = heartbeat
        self.group = Group(None, topology.rank, topology.size, heartbeat.waiting)
        """All ranks, for small exchanges on the training thread."""
        context = LoadContext(self.group, topology, setting.deadline_seconds)
        self.loader = Loader(context, setting.seed, setting.device, heartbeat)
        """Loads pretrained weights, and says what it took."""
        self._calls = calls
        self._exchangers = exchangers
        self._locksteps: dict[int, Lockstep] = {}
        self._sharded: dict[int, _Sharded] = {}
        self._checkpoint: Checkpoint | None = None
        self._evaluated: dict[int, tuple[Dataset[Any], int]] = {}
        """Evaluation data that was looked at, and its length."""

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        return self.topology.rank

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0: the one that prints and saves."""
        return self.topology.is_leader

    def exchanger(self) -> Exchanger:
        """A new exchanger of gradients, for one thread; a collective call."""
        return self._exchangers.exchanger(sync=self.setting.sync)

    def agree(self, facts: Mapping[str, object]) -> None:
        """Raise unless all ranks hold the same facts."""
        own = {**facts, "torch": torch.__version__}
        everyones = [json.loads(text) for text in self.group.gather(json.dumps(own), "comparing settings")]
        for name in own:
            values = {rank: other[name] for rank, other in enumerate(everyones)}
            odd = next((rank for rank, value in values.items() if value != values[0]), None)
            if odd is not None:
                raise UsageError(
                    f"{name} is {values[0]!r} on rank 0 and {values[odd]!r} on rank {odd}; start all with the same"
                )

    def load(
        self,
        model: Model,
        *,
        weights: str,
        how: How = "slices",
        strict: bool = True,
        storage: str | Path = ".",
    ) -> torch.nn.Module:
        """The model with pretrained weights, the same bits on every rank; storage is read once, not once per rank.

        `model` is a module, a function that makes one (better: then nothing is drawn only to be overwritten), or
        what `from_pretrained` takes, for a Hugging Face folder. `weights` is a path in `storage`, an absolute one, or
        s3://…. Any rank's trouble with them is raised on all ranks.
        """
        with self._calls.inside("load"):
            return self.loader.load(model, weights, how=how, strict=strict, storage=storage).module

    def replicate(
        self, module: torch.nn.Module, *, find_unused: bool = False, known: ProbeResult | None = None
    ) -> DistributedDataParallel:
        """The model as a real DDP whose replicas are verified to start as the same bits.

        Say `find_unused` when some parameters take no part in the first batch's shards; else that is refused.
        `known` is an earlier probe's result, of a model after `verify_start`; without it the first step probes it.
        """
        if known is None:
            self.verify_start(module)
        busy = self.topology.local_size * self.threads
        free_cores = len(os.sched_getaffinity(0)) - busy
        model = wrap(module, free_cores=free_cores)
        lockstep = Lockstep(
            model,
            self.setting,
            self.exchanger(),
            self._exchangers.wire,
            self.group,
            self.heartbeat,
            find_unused=find_unused,
            known=known,
        )
        self._locksteps[id(model)] = lockstep
        return model

    def verify_start(self, module: torch.nn.Module) -> None:
        """Move the model to its device; raise unless it can be exact and all ranks hold the same first weights."""
        refuse_what_cannot_be_exact(module)
        module.to(self.setting.device)
        with self._calls.inside("replicate"):
            same_start(module, self.group)

    def shard_optimizer(
        self,
        model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        *,
        share_weights: bool = False,
        own_gradients: bool = False,
    ) -> torch.optim.Optimizer:
        """Let each rank of a node update its part of the weights only, with the same bits as before.

        The optimizer is changed in place, and returned: on this rank it then holds its part of the parameters
        and the state for that part, and after its `step` every rank has all weights. Make it over the model's
        parameters as ever, with groups and a schedule as you like; use it with `step` or `update`. Elementwise
        optimizers only.

        Each rank keeps weights of its own, so a script may write to them in between, if it does so on all
        ranks alike. With `share_weights` the ranks of a node have one memory for all their weights: nothing
        has to be copied, but then only the optimizer may write to them.

        With `own_gradients` a rank of a team on one node gets the mean gradient of its own part alone, which is
        less work; `.grad` then means nothing elsewhere, and `clip_norm` cannot be used.
        """
        names = {parameter: name for name, parameter in model.module.named_parameters()}
        refuse_what_cannot_be_sharded(optimizer, names, self.threads)
        lockstep, topology = self._lockstep(model), self.topology
        if not self.setting.sync:
            raise UsageError(
                "sync is off: every rank updates a model of its own, with an optimizer of its own"
            )
        held = {p for group in optimizer.param_groups for p in group["params"]}
        missing = [name for p, name in names.items() if p.requires_grad and p not in held]
        if own_gradients and missing:
            raise UsageError(
                f"own_gradients: {missing[0]} is not in this optimizer, and would have no gradient; give the optimizer "
                "all parameters, or leave own_gradients out"
            )
        shapes = [[names[p], *p.shape] for group in optimizer.param_groups for p in group["params"]]
        self.agree({"ranks of a node": topology.local_size, "the optimizer's parameters": shapes})
        if topology.local_size > 1 and id(optimizer) not in self._sharded:
            device = self.setting.device
            ranks = node_group(self.group, topology.node, topology.local_rank, device)
            update = ShardedUpdate(
                optimizer,
                ranks.rank,
                ranks.size,
                handover_within(ranks, model.module, share_weights, device, self.setting.deadline_seconds),
                lambda waiting: lockstep.say(Phase.EXCHANGE if waiting else Phase.UPDATE),
            )
            self._sharded[id(optimizer)] = _Sharded(optimizer, ranks, update)
            if own_gradients and topology.nodes == 1:
                lockstep.keep_own(update.own_places)
        return optimizer

    def sharing(self, optimizer: torch.optim.Optimizer) -> Sharing | None:
        """Which parts of a sharded optimizer this rank holds; None for one that every rank has whole."""
        sharded = self._sharded.get(id(optimizer))
        if sharded is None:
            return None
        parts = {
            part: Part(whole, cut.start, cut.stop) for part, (whole, cut) in sharded.update.parts.items()
        }
        return Sharing(parts, sharded.ranks, self.topology.node, self.topology.nodes)

    def batches(
        self,
        dataset: Dataset[Any],
        *,
        global_batch: int,
        epochs: int | None = None,
        steps: int | None = None,
        shuffle: bool = True,
        split: SplitKind = "interleaved",
        workers: int = 0,
        accumulate: int = 1,
        collate: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        fresh: Callable[[], Dataset[Any]] | None = None,
        name: str = "the dataset",
        resumes: bool = True,
    ) -> Batches:
        """This rank's shards of every global batch; each sample exactly once per epoch over all ranks. A collective
        call: all ranks give the same whole dataset.

        After `checkpoint.resume()` they begin at the sample that comes next, unless `resumes` is off.

        With `drop_last` an epoch ends with its last full batch, and the samples after it take no part. `fresh` makes
        another such dataset, to find out whether samples depend on what was read before; `name` is for errors.
        """
        if global_batch < 1:
            raise UsageError(f"global_batch is {global_batch}; a step needs at least one sample")
        if (epochs is None) == (steps is None):
            raise UsageError("give epochs or steps, one of them")
        with self._calls.inside("batches"):
            samples = check_dataset(dataset, name, self.setting.seed, self.group, fresh=fresh)
        cut = Split(samples, global_batch, self.setting.shards, split, drop_last)
        if cut.steps == 0:
            raise UsageError(
                f"{name} has {samples} samples, less than one batch of {global_batch}, and drop_last leaves none; use "
                "a smaller global_batch"
            )
        plan = BatchPlan(cut, self.rank, self.topology.size, self.setting.seed, shuffle, accumulate)
        length = steps if steps is not None else (epochs or 0) * cut.steps
        return Batches(
            dataset,
            plan,
            steps=length,
            workers=workers,
            collate=collate,
            cursor=self._first_step if resumes else None,
        )

    def checkpoint(
        self,
        *,
        model: Any,
        optimizer: Any,
        schedule: Any = None,
        extra: dict[str, Any] | None = None,
        every: int = 0,
        every_seconds: float | None = None,
        keep: int = 2,
        keep_every: int = 0,
        memory_every: int | Literal["auto"] = "auto",
        folder: str | Path | None = None,
        rescue: str | Path | None = None,
        any_recipe: bool = False,
    ) -> Checkpoint:
        """Checkpoints of this script, as those of `dure train`: call `resume()` before the first step and
        `save_if_due()` after each; the end is saved when the team is left. A collective call.

        `model`, `optimizer` and `schedule` may each be a dict or a list of several. `extra` is a dict of your own:
        tensors, plain values, and whatever has `state_dict` and `load_state_dict`, such as an average of the weights.

        Saved every `every` steps and every `every_seconds` seconds (600 without `every`), in `folder`: a folder or
        s3://bucket/prefix; without one, in the run's folder that `dure run` gives. The last `keep` stay, and those of
        every `keep_every` steps. Under `dure run` states are also kept in the launcher's memory, every `memory_every`
        steps. `rescue`: where the last state goes when `folder` refuses it. A state of another recipe (other code,
        seed, torch, …) is refused, unless `any_recipe`.
        """
        if self._checkpoint is not None:
            raise UsageError("this team has a checkpoint already; give it all models, as a dict or a list")
        wanted = Wanted(
            model,
            optimizer,
            schedule,
            extra,
            every,
            every_seconds,
            keep,
            keep_every,
            memory_every,
            folder,
            rescue,
            any_recipe,
        )
        wire = str(self._exchangers.wire.dtype)
        with self._calls.inside("checkpoint"):
            self._checkpoint = Checkpoint(self, self._calls, wire, wanted)
        return self._checkpoint

    def step(
        self,
        model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        batch: Batch,
        loss: Loss,
        *,
        schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
        clip_norm: float | None = None,
    ) -> float:
        """Forward, backward, exchange and update; returns the mean loss of the global batch."""
        outcome = self.forward_backward(model, batch, loss)
        self.update(model, optimizer, schedule=schedule, clip_norm=clip_norm)
        return outcome.loss

    def forward_backward(
        self, model: DistributedDataParallel, batch: Batch, loss: Loss, flags: int = 0
    ) -> StepResult:
        """The first half of `step`: `.grad` holds the global batch's mean gradient afterwards.

        `flags` are bits of this rank; the outcome has those of all ranks, OR-ed.
        """
        lockstep, summed = self._lockstep(model), as_sum(loss)
        with self._calls.inside("forward_backward", getattr(batch, "step", None)):
            lockstep.prepare(batch, summed)
            if self._checkpoint is not None:
                flags |= self._checkpoint.begin_step(batch)
            result = lockstep.forward_backward(batch, summed, flags)
        if self._checkpoint is not None:
            self._checkpoint.end_step(batch, result.flags)
        return result

    def update(
        self,
        model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
        clip_norm: float | None = None,
    ) -> float | None:
        """The second half of `step`; returns the gradients' norm when they are clipped."""
        unread = nullcontext() if self._checkpoint is None else self._checkpoint.updating()
        with self._calls.inside("update"), unread:
            return self._lockstep(model).update(optimizer, schedule, clip_norm)

    def discard(self, model: DistributedDataParallel) -> None:
        """Give up the gradients of the last `forward_backward`, on all ranks alike: no `update` follows."""
        self._lockstep(model).discard()

    def evaluate(
        self,
        model: DistributedDataParallel,
        dataset: Dataset[Any],
        measures: Mapping[str, Loss | LossSum],
        *,
        batch: int,
        workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> EvalResult:
        """Each measure's mean over the dataset, every sample exactly once.

        Without synchronisation each rank judges its own model on all of it.
        """
        self.heartbeat.beat(-1, Phase.EVALUATE)
        with self._calls.inside("evaluate"):
            batches = self._eval_batches(dataset, batch, workers, collate, None)
            group = self.group if self.setting.sync else None
            return evaluate(model.module, self._alive(batches), _summed(measures), self.setting, group)

    def rehearse_evaluation(
        self,
        model: DistributedDataParallel,
        dataset: Dataset[Any],
        measures: Mapping[str, Loss | LossSum],
        *,
        batch: int,
        collate: Callable[[list[Any]], Any] | None = None,
        fresh: Callable[[], Dataset[Any]] | None = None,
        name: str = "the evaluation data",
    ) -> None:
        """Look at the evaluation data, and try the measures on its smallest part, before anything is trained."""
        batches = self._eval_batches(dataset, batch, 0, collate, fresh, name)
        rehearse(model.module, batches, _summed(measures), self.setting)

    def prove(
        self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer | None = None, step: int = -1
    ) -> str:
        """The fingerprint of this replica's whole state, the same on all ranks, or ReplicasDiffer."""
        self.heartbeat.beat(step, Phase.PROVE)
        sharded = self._sharded.get(id(optimizer))
        ranks = sharded.ranks if sharded is not None else None
        with self._calls.inside("prove"):
            return prove_same(model.module, optimizer, self.group, step, ranks)[self.rank]

    def how_far_apart(self, model: DistributedDataParallel) -> Apart:
        """How far the ranks' weights are from each other (nothing, unless `sync` is off)."""
        with self._calls.inside("how_far_apart"):
            return how_far_apart(model.module, self.group)

    def done(self) -> None:
        """Leave the team: the end is saved where there is a checkpoint, threads end, then the process groups."""
        self._leave(saves=True)

    def _leave(self, *, saves: bool) -> None:
        if self._checkpoint is not None:
            with self._calls.inside("save"):
                self._checkpoint.finish(saves=saves)
            self._checkpoint = None
        self.heartbeat.beat(-1, Phase.DONE)
        self._calls.leave()
        for lockstep in self._locksteps.values():
            lockstep.close()
        self._locksteps.clear()
        for sharded in self._sharded.values():
            sharded.update.close()
        self._sharded.clear()
        self.heartbeat.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        # A model and its hook hold each other, and the backend's threads: free them while Python is still whole,
        # or a thread that wants it during the interpreter's end aborts the process.
        atexit.register(gc.collect)

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a failure others may wait in a collective, and leaving would wait for them; but all stop together.
        if error is None or self.topology.size == 1 or isinstance(error, Resumable):
            self._leave(saves=error is None)

    def _eval_batches(
        self,
        dataset: Dataset[Any],
        batch: int,
        workers: int,
        collate: Callable[[list[Any]], Any] | None,
        fresh: Callable[[], Dataset[Any]] | None,
        name: str = "the evaluation data",
    ) -> Batches:
        seed, place = self.setting.seed, "eval sample"
        if id(dataset) not in self._evaluated:  # looked at when it is used for the first time
            samples = check_dataset(dataset, name, seed, self.group, place=place, fresh=fresh)
            self._evaluated[id(dataset)] = (dataset, samples)
        cut = Split(self._evaluated[id(dataset)][1], batch, self.setting.shards)
        rank, ranks = (self.rank, self.topology.size) if self.setting.sync else (0, 1)
        plan = BatchPlan(cut, rank, ranks, seed, shuffle=False)
        return Batches(dataset, plan, steps=cut.steps, workers=workers, collate=collate, place=place)

    def _first_step(self, batches: Batches) -> int:
        return 0 if self._checkpoint is None else self._checkpoint.first_step(batches)

    def _alive(self, batches: Batches) -> Iterator[Batch]:
        """The batches, with a beat for each: a long evaluation is not a hang."""
        for batch in batches:
            self.heartbeat.beat(-1, Phase.EVALUATE)
            yield batch

    def _lockstep(self, model: DistributedDataParallel) -> Lockstep:
        try:
            return self._locksteps[id(model)]
        except KeyError:
            raise UsageError("this model is not of this team; use what team.replicate returned") from None


def _summed(measures: Mapping[str, Loss | LossSum]) -> dict[str, LossSum]:
    return {name: as_sum(measure, "the measure") for name, measure in measures.items()}
