"""One rank's part of `dure train`: wire the rooms together; the loop is one screen long."""

from __future__ import annotations

import datetime
import os
import signal
import socket
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from dure import __version__, events, factory, results, update
from dure.audit import fingerprints_of, whole_fingerprint
from dure.batches import MANY_IDS, Batch, Batches, check_dataset
from dure.checkpoint.find import refuse_other_recipe
from dure.checkpoint.keeper import STOP, Keeper
from dure.checkpoint.memory import MemoryTier, memory_tier
from dure.checkpoint.save import WRITE_SECONDS
from dure.checkpoint.state import Share, State, WholeState, capture, restore
from dure.checkpoint.where import location, open_to_write
from dure.errors import DureError, Resumable
from dure.exchange.group import node_group
from dure.fingerprint import weights_sha256
from dure.job import LoadedJob
from dure.loading.load import Loaded, Progress
from dure.lockstep import Outcome, probe_on
from dure.loss import LOSSES, METRICS, LossSum, as_sum
from dure.pulse import Phase
from dure.recipe import recipe_hash, recipe_of
from dure.replica import refuse_what_cannot_be_exact
from dure.results import RankResult
from dure.run_folder import RunFolder
from dure.team import Team, start


def run_rank(job_text: str, run_path: str) -> RankResult:
    """The entry point of every rank: train the job, from joining the team to the last proof."""
    began = time.perf_counter()
    loaded = LoadedJob.from_json(job_text)
    section, train = loaded.job.team, loaded.job.train
    with start(
        seed=train.seed,
        shards=section.shards,
        threads=section.threads,
        device=section.device,
        sync=section.sync,
        precision=train.precision,
        wire=loaded.job.reduce.wire,
        transport=loaded.job.reduce.transport,
        hang_seconds=section.hang_seconds,
    ) as team:
        folder = RunFolder(Path(run_path))
        recorder = events.Recorder(folder.events(team.rank))
        try:
            run = Run(loaded, folder, team, recorder, {"start": time.perf_counter() - began})
            run.train()
            return run.end()
        finally:
            recorder.close()


@dataclass
class Run:
    """One rank's run of a job."""

    loaded: LoadedJob
    folder: RunFolder
    team: Team
    recorder: events.Recorder
    seconds: dict[str, float]
    notes: list[str] = field(default_factory=list)
    loss: float = float("nan")
    metrics: dict[str, float] = field(default_factory=dict)
    samples_seen: int = 0
    steps_done: int = 0
    judged_after: int = -1
    """`steps_done` at the last evaluation."""

    def __post_init__(self) -> None:
        began = time.perf_counter()
        self.team.pulse.beat(0, Phase.LOADING)
        job, make = self.loaded.job, self._make
        self.weights: Loaded | None = None
        self.loss_sum: LossSum = self._named(job.train.loss, "train.loss", LOSSES)
        module = self._model()
        refuse_what_cannot_be_exact(module)
        module.to(self.team.setting.device)
        self.batches = self._batches()
        self.eval_data = make("eval.factory", job.eval.factory, job.eval.args) if job.eval.factory else None
        if self.eval_data is not None:
            check_dataset(self.eval_data, "eval.factory", job.train.seed)
        self.measures = {name: self._named(name, "eval.metrics", METRICS) for name in job.eval.metrics}
        self.model = self._replicate(module)
        self.optimizer = update.make_optimizer(job.train, module)
        if job.train.shard_optimizer:
            self.team.shard_optimizer(
                self.model, self.optimizer, share_weights=True, own_gradients=job.train.clip_norm is None
            )
        self.schedule = update.make_schedule(job.train, self.optimizer)
        self.recipe = self._agree_on_recipe()
        self.keeper = self._keeper()
        self.memory = self._memory_tier()
        self.start = self._resume()
        self._record_team()
        self.seconds["load"] = time.perf_counter() - began

    def train(self) -> None:
        """The loop."""
        job, began, judging = self.loaded.job, time.perf_counter(), 0.0
        for batch in self.batches:
            wish = self.keeper.wish() if self.keeper is not None else 0
            outcome = self.team.forward_backward(self.model, batch, self.loss_sum, wish)
            updating = time.perf_counter()
            norm = self.team.update(
                self.model, self.optimizer, schedule=self.schedule, clip_norm=job.train.clip_norm
            )
            self.record(batch, outcome, norm, time.perf_counter() - updating)
            if job.train.prove_every and self.steps_done % job.train.prove_every == 0:
                self.prove()
            if (
                batch.last_of_epoch
                and job.eval.every_epochs
                and (batch.epoch + 1) % job.eval.every_epochs == 0
            ):
                judging += self.evaluate()
            self.keep_if_due()
            self.save_if_due(outcome.wishes)
            self.team.pulse.beat(batch.step + 1, Phase.DATA)
        self.seconds["train"] = time.perf_counter() - began - judging
        if self.judged_after != self.steps_done:
            judging += self.evaluate()
        self.seconds["eval"] = judging

    def record(self, batch: Batch, outcome: Outcome, norm: float | None, updating: float) -> None:
        """Keep what the step came to; costs the training thread some microseconds."""
        self.loss = outcome.loss
        self.steps_done = batch.step + 1
        self.samples_seen += len(batch.ids)
        self.recorder.record(
            events.Stepped(
                epoch=batch.epoch,
                step=batch.step,
                loss=outcome.loss,
                samples=len(batch.ids),
                samples_of_batch=batch.size,
                seconds={
                    "data": round(batch.waited_seconds, 6),
                    "compute": round(outcome.compute_seconds, 6),
                    "exchange": round(outcome.exchange_seconds, 6),
                    "update": round(updating, 6),
                },
                lr=self.optimizer.param_groups[0]["lr"],
                grad_norm=norm,
                ids=batch.ids if len(batch.ids) <= MANY_IDS else None,
                mark=f"{batch.mark:016x}",
            )
        )

    def prove(self) -> str | None:
        """All replicas compare their state; nothing to compare when they train apart."""
        if not self.team.setting.sync:
            return None
        found = self.team.prove(self.model, self.optimizer, self.steps_done - 1)
        self.recorder.record(events.Proved(self.steps_done - 1, found, agree=True))
        return found

    def evaluate(self) -> float:
        """Judge the model, if the job says on what; returns the seconds it took."""
        began = time.perf_counter()
        if self.eval_data is not None:
            job = self.loaded.job
            judged = self.team.evaluate(
                self.model,
                self.eval_data,
                {"loss": self.loss_sum, **self.measures},
                batch=job.eval.batch or job.data.global_batch,
                workers=job.data.workers,
                collate=self._collate(),
            )
            self.metrics, self.judged_after = judged.metrics, self.steps_done
            self.recorder.record(
                events.Evaluated(
                    self.steps_done - 1,
                    judged.metrics,
                    judged.samples,
                    len(self.eval_data),
                    f"{judged.mark:016x}",
                )
            )
        return time.perf_counter() - began

    def keep_if_due(self) -> None:
        """Keep the state in memory that outlives this rank."""
        if self.memory is not None and self.memory.is_due(self.steps_done):
            self.memory.keep(self._state_to_keep, self.steps_done, self.recorder.unwritten())
            if self.memory.trouble:
                self._note(f"no states are kept in memory: {self.memory.trouble}")

    def save_if_due(self, wishes: int) -> None:
        """Save when all ranks agree that it is time; when one was asked to stop, save and raise Resumable."""
        keeper = self.keeper
        if keeper is None:
            return
        if keeper.due(wishes, self.steps_done, judged=self.judged_after == self.steps_done):
            keeper.save(self._state(), self._saving)
        if wishes & STOP and self.steps_done < self.batches.steps:
            keeper.wait(self._saving)
            trouble = keeper.last.trouble if keeper.last is not None else None
            raise Resumable(
                f"stopped after step {self.steps_done} of {self.batches.steps}, resumable: the same command with "
                f"--run-dir {self.folder.path} goes on "
                + (
                    f"from the checkpoint before, as this one could not be saved: {trouble}"
                    if trouble
                    else "from there"
                )
            )

    def save_last(self) -> None:
        """Save the end of the run, unless that was done, and wait until it is there."""
        keeper = self.keeper
        if keeper is None:
            return
        keeper.wait(self._saving)
        if not keeper.is_saved(self.steps_done):
            keeper.save(self._state(), self._saving)
            keeper.wait(self._saving)

    def end(self) -> RankResult:
        """The last proof, the last checkpoint, and what this rank has to tell."""
        began = time.perf_counter()
        fingerprint = self.prove() or self._own_fingerprint()
        sha256 = weights_sha256(self.model.module)
        apart = None if self.team.setting.sync else self.team.how_far_apart(self.model)
        self.save_last()
        self.recorder.record(events.Ended(self.steps_done, fingerprint, sha256, self.recorder.lost))
        self.recorder.close()
        self.seconds["prove"] = time.perf_counter() - began
        split = self.batches.plan.split
        return RankResult(
            rank=self.team.rank,
            steps=self.steps_done,
            epochs=self.steps_done // split.steps,
            loss=self.loss,
            metrics=self.metrics,
            samples_seen=self.samples_seen,
            recipe=self.recipe,
            weights_sha256=sha256,
            fingerprint=fingerprint,
            parameters=sum(p.numel() for p in self.model.module.parameters()),
            samples=split.samples,
            device=str(self.team.setting.device.type),
            seconds=self.seconds,
            lost_events=self.recorder.lost,
            apart=apart,
            notes=tuple(self.notes),
            start=self.start,
            loaded=self._loaded(),
        )

    def _loaded(self) -> results.Loaded | None:
        if self.weights is None:
            return None
        return results.Loaded(
            weights=str(self.loaded.job.model.weights),
            how=self.weights.how,
            fingerprint=self.weights.fingerprint,
            bytes=self.weights.nbytes,
            requests=int(self.weights.access["read_requests"]),
            read_bytes=int(self.weights.access["read_bytes"]),
        )

    def _keeper(self) -> Keeper | None:
        """Who saves; nobody where nothing is to be saved, or where ranks have models of their own."""
        team, settings = self.team, self.loaded.job.checkpoint
        if not settings.wanted or not team.setting.sync:
            return None
        trouble = ""
        if team.is_leader:
            try:
                open_to_write(self.loaded, self.folder)
            except DureError as error:
                trouble = str(error)
        team.group.raise_together(trouble, "opening the storage of checkpoints")
        keeper = Keeper(
            open_to_write(self.loaded, self.folder),
            settings,
            team.group,
            team.group.twin(WRITE_SECONDS),
            self.recorder,
            self.folder.stop,
            lambda: team.pulse.beat(0, Phase.LOADING),
        )
        signal.signal(signal.SIGUSR1, lambda number, frame: keeper.ask_to_stop())
        return keeper

    def _memory_tier(self) -> MemoryTier | None:
        every, world = self.loaded.job.checkpoint.memory_every, self.team.world
        if every == 0 or not self.team.setting.sync:  # replicas that differ are no state
            return None
        steps = None if every == "auto" else every
        return memory_tier(os.environ, world.local_rank, world.local_size, self.team.group, steps)

    def _resume(self) -> int:
        """Go on from the newest state in memory, else from the newest checkpoint, if there is one; returns the
        first step of this session."""
        kept = self.memory.newest() if self.memory is not None else None
        whole = self._newest_saved() if kept is None else kept.state
        if kept is not None:
            self.recorder.bring_in(kept.events)
            if self.keeper is not None:
                self.keeper.follow(str(kept.state.facts["line"]))
        if whole is not None:
            self._go_on_from(whole)
        if self.memory is not None:
            self.memory.begin(self.steps_done)
        return self.steps_done

    def _newest_saved(self) -> WholeState | None:
        if self.keeper is None:
            return None
        team = self.team
        node = node_group(team.group, team.world.node, team.world.local_rank, team.setting.device)
        where = location(self.loaded, self.folder)
        return self.keeper.resume(node, lambda found: refuse_other_recipe(found, self.recipe_words, where))

    def _go_on_from(self, whole: WholeState) -> None:
        restore(whole, self.model.module, self.optimizer, self.schedule, self.team.sharing(self.optimizer))
        facts = whole.facts
        self.steps_done, self.loss = int(facts["step"]), float(facts["loss"])
        self.metrics, self.judged_after = dict(facts["metrics"]), int(facts["judged_after"])
        self.batches = self.batches.starting_at(self.steps_done)
        self.team.prove(self.model, self.optimizer, self.steps_done - 1)
        self._note(f"goes on from step {self.steps_done} of {self.batches.steps}")

    def _state_to_keep(self, share: Share) -> State:
        """For memory: the launcher is the same, so that it need not be told what run this is."""
        sharing = self.team.sharing(self.optimizer)
        if sharing is not None:
            sharing = replace(sharing, node=0, nodes=1)  # every node keeps all of it
        facts = {
            "step": self.steps_done,
            "line": self.keeper.line if self.keeper is not None else "",
            "loss": self.loss,
            "metrics": self.metrics,
            "judged_after": self.judged_after,
        }
        return capture(self.model.module, self.optimizer, self.schedule, facts, share, sharing)

    def _state(self) -> State:
        team, steps = self.team, self.batches.plan.split.steps
        self._saving()
        facts = {
            "step": self.steps_done,
            "epoch": self.steps_done // steps,
            "step_of_epoch": self.steps_done % steps,
            "line": self.keeper.line if self.keeper is not None else "",
            "saved_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "recipe": self.recipe,
            "recipe_words": self.recipe_words,
            "job": self.loaded.to_json(),
            "seed": team.setting.seed,
            "shards": team.setting.shards,
            "threads": team.threads,
            "ranks": team.world.size,
            "loss": self.loss,
            "metrics": self.metrics,
            "judged_after": self.judged_after,
            "judged": self.metrics if self.judged_after == self.steps_done else {},
            "versions": {"dure": __version__, "torch": torch.__version__},
        }
        share = Share(team.rank, team.world.size)
        return capture(
            self.model.module, self.optimizer, self.schedule, facts, share, team.sharing(self.optimizer)
        )

    def _saving(self) -> None:
        self.team.pulse.beat(self.steps_done, Phase.SAVE)

    def _own_fingerprint(self) -> str:
        return whole_fingerprint(fingerprints_of(self.model.module, self.optimizer))

    def _make(self, key: str, reference: str, args: dict[str, Any]) -> Any:
        return factory.make(reference, key, self.loaded.folder, self.loaded.arguments(args))

    def _named(self, name: str, key: str, known: dict[str, LossSum]) -> LossSum:
        if name in known:
            return known[name]
        return as_sum(factory.find(name, key, self.loaded.folder))

    def _collate(self) -> Any:
        reference = self.loaded.job.data.collate
        return factory.find(reference, "data.collate", self.loaded.folder) if reference else None

    def _batches(self) -> Batches:
        data, train = self.loaded.job.data, self.loaded.job.train
        dataset = self._make("data.factory", data.factory, data.args)
        check_dataset(dataset, "data.factory", train.seed)
        return self.team.batches(
            dataset,
            global_batch=data.global_batch,
            epochs=train.epochs,
            steps=train.steps,
            shuffle=data.shuffle,
            split=data.split,
            workers=data.workers,
            accumulate=train.accumulate,
            collate=self._collate(),
        )

    def _model(self) -> torch.nn.Module:
        """From the seed alone (scenario B), or with pretrained weights (scenario A)."""
        wanted = self.loaded.job.model
        model: Any = self.loaded.arguments(wanted.args)
        if wanted.factory is not None:
            model = partial(self._make, "model.factory", wanted.factory, wanted.args)
        if wanted.weights is None:
            return model()  # type: ignore[no-any-return]
        self.weights = loaded = self.team.loader.load(
            model,
            wanted.weights,
            how=wanted.load,
            strict=wanted.strict,
            storage=self.loaded.storage,
            progress=self._show_loading(),
        )
        for names, what in (
            (loaded.missing, "not in the file of weights: drawn from the seed"),
            (loaded.unexpected, "only in the file of weights: left out"),
        ):
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                self._note(f"{', '.join(names[:3])}{more} {'is' if len(names) == 1 else 'are'} {what}")
        used = loaded.access
        self.recorder.record(
            events.WeightsLoaded(
                loaded.how,
                loaded.fingerprint,
                loaded.nbytes,
                dict(loaded.seconds),
                f"{loaded.built}; {loaded.way}",
            )
        )
        self.recorder.record(
            events.StorageUsed(
                rank=self.team.rank,
                location=loaded.location,
                what="weights",
                requests=int(used["read_requests"]),
                bytes=int(used["read_bytes"]),
                seconds=round(used["seconds"], 6),
            )
        )
        return loaded.module

    def _show_loading(self) -> Progress:
        """Of a load that takes long, a word a second."""
        began = shown = 0.0

        def show(done: int, total: int) -> None:
            nonlocal began, shown
            now = time.perf_counter()
            if not began:
                began = shown = now
            if now - shown >= 1.0:
                shown = now
                self.recorder.record(events.Loading(done, total, round(now - began, 3)))

        return show

    def _replicate(self, module: torch.nn.Module) -> DistributedDataParallel:
        """Probe the model on its first shard, so that DDP is told what it needs to know; then wrap it."""
        first = next(iter(self.batches.first_only()))
        known = probe_on(module, first, self.loss_sum, self.team.setting).with_others(self.team.group)
        wanted = self.loaded.job.model.find_unused
        find_unused = bool(known.unused) if wanted == "auto" else wanted
        if known.unused and find_unused:
            self._note(f"{len(known.unused)} parameters take no part in some shards ({known.unused[0]}, …)")
        return self.team.replicate(module, find_unused=find_unused, known=known)

    def _agree_on_recipe(self) -> str:
        device = self.team.setting.device.type
        weights = None
        if self.weights is not None:
            weights = {"fingerprint": self.weights.fingerprint, "config": self.weights.config}
        self.recipe_words = recipe_of(self.loaded, device, self.batches.plan.split.samples, weights)
        self.team.agree(self.recipe_words)
        return recipe_hash(self.recipe_words)

    def _record_team(self) -> None:
        section, split = self.loaded.job.team, self.batches.plan.split
        if split.global_batch < section.shards:
            self._note(
                f"data.global_batch is {split.global_batch}: {section.shards - split.global_batch} of "
                f"{section.shards} shards have no samples"
            )
        counted = str(events.sessions_in(self.folder.events(0))) if self.team.is_leader else ""
        self.session = int(self.team.group.gather(counted, "counting sessions")[0])
        cores = len(os.sched_getaffinity(0))
        busy = section.ranks * section.threads
        if self.team.setting.device.type == "cpu" and busy < cores:
            self._note(
                f"{cores - busy} of {cores} cores are idle; --ranks {min(cores // section.threads, section.shards)} "
                "uses them with the same bits"
            )
        self.recorder.record(
            events.TeamFormed(
                rank=self.team.rank,
                ranks=self.team.world.size,
                shards=section.shards,
                threads=section.threads,
                device=str(self.team.setting.device),
                host=socket.gethostname(),
                pid=os.getpid(),
                sync=section.sync,
                recipe=self.recipe,
                parameters=sum(p.numel() for p in self.model.module.parameters()),
                samples=split.samples,
                steps=self.batches.steps,
                session=self.session,
                start=self.start,
            )
        )

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.recorder.record(events.Noted(text))
