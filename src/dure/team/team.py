"""This rank's place in the team, and what it does together with the others."""

from __future__ import annotations

import atexit
import gc
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from dure.base.errors import ComputedWrongly, Resumable, UsageError
from dure.base.say import say
from dure.checkpoint.state import Sharing
from dure.comm.call_board import CallBoard
from dure.comm.reduce.exchanger import Exchanger
from dure.comm.reduce.factory import ExchangerFactory
from dure.comm.sharded_optimizer import refuse_what_cannot_be_sharded
from dure.comm.topology import Topology
from dure.data.batches import Batch, Batches
from dure.data.shards import SplitKind
from dure.device.pinned import move_module
from dure.observe.heartbeat import Heartbeat, Phase
from dure.observe.results import Apart
from dure.proof.proof_cadence import ProofCadence
from dure.proof.verify_replicas import how_far_apart, prove_same
from dure.step.evaluation import EvalResult, evaluate, rehearse
from dure.step.forward import Forward, Setting
from dure.step.gathered import Gathered
from dure.step.lockstep import Lockstep, StepResult
from dure.step.loss import LossSum
from dure.step.replica import (
    ProbeResult,
    refuse_what_cannot_be_exact,
    same_start,
    wrap,
)
from dure.step.shadow import Audited
from dure.team.checkpoint import Checkpoint, Wanted
from dure.team.data import TeamData
from dure.team.member import Member
from dure.team.sharding import ShardedOptimizers, refuse_missing
from dure.team.steps import (
    Averages,
    Loss,
    Optimizers,
    Replicas,
    Schedules,
    measures_of,
    plain_module,
    schedules_in,
)
from dure.weights.load import How
from dure.weights.load_group import LoadContext
from dure.weights.loader import Loader, Model

PUBLIC = (
    "topology", "rank", "is_leader", "device", "threads",
    "checkpoint", "load", "replicate", "shard_optimizer", "batches",
    "step", "forward_backward", "update", "discard", "evaluate",
    "prove", "how_far_apart", "print", "barrier", "gather", "on_leader", "log_to", "log", "done",
)  # fmt: skip
"""What scripts may use of a team; all else is for the other rooms of dure, and may change without notice."""


class Team(Member):
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
        super().__init__(topology, setting, threads, heartbeat, calls)
        context = LoadContext(self.group, topology, setting.deadline_seconds)
        self.loader = Loader(context, setting.seed, setting.device, heartbeat)
        """Loads pretrained weights, and says what it took."""
        self._exchangers = exchangers
        self._replicas = Replicas()
        self._sharded = ShardedOptimizers(topology, setting, self.group)
        self._data = TeamData(topology, setting, self.group, heartbeat)
        self._checkpoint: Checkpoint | None = None
        self._corruption: ComputedWrongly | None = None
        """What the team ends with, when the step is done in which it was found."""

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
        return self._replicas.add(lockstep)

    def verify_start(self, module: torch.nn.Module) -> None:
        """Move the model to its device; raise unless it can be exact and all ranks hold the same first weights."""
        refuse_what_cannot_be_exact(module)
        move_module(module, self.setting.device)
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
        lockstep = self._replicas.lockstep(model)
        if not self.setting.sync:
            raise UsageError(
                "sync is off: every rank updates a model of its own, with an optimizer of its own"
            )
        refuse_missing(optimizer, names, own_gradients=own_gradients)
        shapes = [[names[p], *p.shape] for group in optimizer.param_groups for p in group["params"]]
        self.agree({"ranks of a node": self.topology.local_size, "the optimizer's parameters": shapes})
        self._replicas.accept(optimizer)
        self._sharded.add(lockstep, optimizer, share_weights=share_weights, own_gradients=own_gradients)
        return optimizer

    def sharing(self, optimizer: torch.optim.Optimizer) -> Sharing | None:
        """Which parts of a sharded optimizer this rank holds; None for one that every rank has whole."""
        return self._sharded.sharing(optimizer)

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
            cut = self._data.split(dataset, global_batch, split, drop_last=drop_last, fresh=fresh, name=name)
        length = steps if steps is not None else (epochs or 0) * cut.steps
        return self._data.batches(
            dataset,
            cut,
            steps=length,
            shuffle=shuffle,
            workers=workers,
            accumulate=accumulate,
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
        keep_best: str | None = None,
        memory_every: int | Literal["auto"] = "auto",
        folder: str | Path | None = None,
        rescue: str | Path | None = None,
        any_recipe: bool = False,
        receipt: bool = True,
    ) -> Checkpoint:
        """Checkpoints of this script, as those of `dure train`: call `resume()` before the first step and
        `save_if_due()` after each; the end is saved when the team is left. A collective call.

        `model`, `optimizer` and `schedule` may each be a dict or a list of several. `extra` is a dict of your own:
        tensors, plain values, and whatever has `state_dict` and `load_state_dict`, such as an average of the weights.

        Saved every `every` steps and every `every_seconds` seconds (600 without `every`), in `folder`: a folder or
        s3://bucket/prefix; without one, in the run's folder that `dure run` gives. The last `keep` stay, those of every
        `keep_every` steps, and the best one by the metric `keep_best` (the lowest "loss", else the highest) of those
        that `save_if_due` was told the metrics of. Under `dure run` states are also kept in the launcher's memory,
        every `memory_every` steps. `rescue`: where the last state goes when `folder` refuses it. A state of another
        recipe (other code, seed, torch, …) is refused, unless `any_recipe`. Beside the checkpoints the run writes its
        receipt (see `dure receipt`), unless `receipt` is off.
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
            keep_best,
            memory_every,
            folder,
            rescue,
            any_recipe,
            receipt,
        )
        wire = str(self._exchangers.wire.dtype)
        with self._calls.inside("checkpoint"):
            self._checkpoint = Checkpoint(self, self._calls, wire, wanted)
        return self._checkpoint

    def step(
        self,
        model: DistributedDataParallel,
        optimizer: Optimizers,
        batch: Batch,
        loss: Loss | None = None,
        *,
        forward: Forward | None = None,
        schedule: Schedules = None,
        clip_norm: float | None = None,
        ema: Averages | None = None,
    ) -> float:
        """Forward, backward, exchange and update; returns the mean loss of the global batch.

        `loss` is a function of (output, target), and batches are pairs (input, target). For all else there is
        `forward`, a function of (model, batch): batches of any form, several forward passes, other models beside the
        trained one, torch.autograd.grad(..., create_graph=True) for a gradient penalty. `model` is then the module
        that was replicated, and what is returned are unreduced losses or the pair (sum, count).

        The other arguments are those of `update`.
        """
        outcome = self.forward_backward(model, batch, loss, forward=forward)
        self.update(model, optimizer, schedule=schedule, clip_norm=clip_norm, ema=ema)
        return outcome.loss

    def forward_backward(
        self,
        model: DistributedDataParallel,
        batch: Batch,
        loss: Loss | LossSum | None = None,
        flags: int = 0,
        *,
        forward: Forward | None = None,
    ) -> StepResult:
        """The first half of `step`: `.grad` holds the global batch's mean gradient afterwards.

        `flags` are bits of this rank; the outcome has those of all ranks, OR-ed.
        """
        self.refuse_to_go_on()
        step = getattr(batch, "step", None)
        lockstep = self._replicas.lockstep(model)
        computed = self._replicas.loss(model, step if step is not None else -1, loss, forward)
        with self._calls.inside("forward_backward", step):
            lockstep.prepare(batch, computed)
            if self._checkpoint is not None:
                flags |= self._checkpoint.begin_step(batch)
            result = lockstep.forward_backward(batch, computed, flags)
        self._note_corruption(result.audited)
        if self._checkpoint is not None:
            self._checkpoint.end_step(batch, result)
        return result

    @property
    def is_corrupted(self) -> bool:
        """Whether the team ends after this step, as a rank was found to compute wrongly; the same on all ranks."""
        return self._corruption is not None

    def refuse_to_go_on(self) -> None:
        """After the update of a step in which a rank was found to compute wrongly: raise that, on all ranks."""
        found, self._corruption = self._corruption, None
        if found is not None:
            raise found

    def _note_corruption(self, audited: Audited | None) -> None:
        if audited is None or audited.corruption is None:
            return
        if self.is_leader:
            say(audited.corruption.words)
        if self.setting.on_corruption != "repeat":
            self._corruption = audited.corruption.error(self.setting.on_corruption)

    def update(
        self,
        model: DistributedDataParallel,
        optimizer: Optimizers,
        *,
        schedule: Schedules = None,
        clip_norm: float | None = None,
        ema: Averages | None = None,
    ) -> float | None:
        """The second half of `step`; returns the gradients' norm when they are clipped.

        `optimizer` and `schedule` may be several, for one model's parts; a schedule is any object with `step`. `ema`
        is a moving average of the model, such as torch.optim.swa_utils.AveragedModel, updated after the optimizer.
        """
        optimizers, schedules = self._replicas.optimizers(optimizer), schedules_in(schedule)
        unread = nullcontext() if self._checkpoint is None else self._checkpoint.updating()
        with self._calls.inside("update"), unread:
            norm = self._replicas.lockstep(model).update(optimizers, schedules, clip_norm)
            if ema is not None:
                ema.update_parameters(model.module)
            return norm

    def mark_gradients(self, model: DistributedDataParallel) -> None:
        """From now on, `forward_backward` also tells fingerprints of the shards' gradients."""
        self._replicas.lockstep(model).mark_gradients()

    def discard(self, model: DistributedDataParallel) -> None:
        """Give up the gradients of the last `forward_backward`, on all ranks alike: no `update` follows."""
        self._replicas.lockstep(model).discard()

    def evaluate(
        self,
        model: torch.nn.Module,
        dataset: Dataset[Any],
        measures: Mapping[str, Loss | LossSum],
        *,
        batch: int,
        workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        gathered: Mapping[str, Gathered | str] | Iterable[str] = (),
        forward: Callable[[Any, Any], tuple[Any, Any]] | None = None,
    ) -> EvalResult:
        """Each measure's mean over the dataset, every sample exactly once.

        `model` is a replica, or a module that is the same on all ranks, such as a moving average. `gathered` are
        measures that are no means: `f1`, `auroc`, `confusion`, or functions of all samples' outputs and targets, in the
        order of the dataset. `forward`, a function of (model, batch), gives (output, target) for batches that are no
        pairs (input, target).

        Without synchronisation each rank judges its own model on all of it.
        """
        self.heartbeat.beat(-1, Phase.EVALUATE)
        wanted = measures_of(measures, gathered, forward)
        with self._calls.inside("evaluate"):
            batches = self._data.eval_batches(dataset, batch, workers, collate)
            group = self.group if self.setting.sync else None
            return evaluate(plain_module(model), self._data.alive(batches), wanted, self.setting, group)

    def rehearse_evaluation(
        self,
        model: DistributedDataParallel,
        dataset: Dataset[Any],
        measures: Mapping[str, Loss | LossSum],
        *,
        batch: int,
        collate: Callable[[list[Any]], Any] | None = None,
        fresh: Callable[[], Dataset[Any]] | None = None,
        gathered: Mapping[str, Gathered | str] | Iterable[str] = (),
        name: str = "the evaluation data",
    ) -> None:
        """Look at the evaluation data, and try the measures on its smallest part, before anything is trained."""
        batches = self._data.eval_batches(dataset, batch, 0, collate, fresh, name)
        rehearse(model.module, batches, measures_of(measures, gathered, None), self.setting)

    def prove(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, step: int = -1
    ) -> str:
        """The fingerprint of this replica's whole state, the same on all ranks, or ReplicasDiffer."""
        return self.prove_and_measure(model, optimizer, step, None)

    def prove_and_measure(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        step: int,
        cadence: ProofCadence | None,
    ) -> str:
        """As `prove`; `cadence` is told what it costs, on all ranks or on none."""
        self.heartbeat.beat(step, Phase.PROVE)
        with self._calls.inside("prove"):
            ranks = self._sharded.ranks_of(optimizer)
            return prove_same(plain_module(model), optimizer, self.group, step, ranks, cadence)[self.rank]

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
        self.logs.close()
        self._replicas.close()
        self._sharded.close()
        self.heartbeat.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        # A model and its hook hold each other, and the backend's threads: free them while Python is still whole,
        # or a thread that wants it during the interpreter's end aborts the process.
        atexit.register(gc.collect)
        if saves:
            self.refuse_to_go_on()

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.logs.close(after_a_failure=error is not None)
        # After a failure others may wait in a collective, and leaving would wait for them; but all stop together.
        if error is None or self.topology.size == 1 or isinstance(error, Resumable):
            self._leave(saves=error is None)

    def _first_step(self, batches: Batches) -> int:
        return 0 if self._checkpoint is None else self._checkpoint.first_step(batches)
