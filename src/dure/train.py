"""One rank's part of `dure train`: wire the rooms together; the loop is one screen long."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from dure import events, factory, results, update
from dure.audit import fingerprints_of, whole_fingerprint
from dure.batches import MANY_IDS, Batch, Batches, check_dataset
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
        recorder = events.Recorder(RunFolder(Path(run_path)).events(team.rank))
        run = Run(loaded, team, recorder, {"start": time.perf_counter() - began})
        try:
            run.train()
            return run.end()
        finally:
            recorder.close()


@dataclass
class Run:
    """One rank's run of a job."""

    loaded: LoadedJob
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
        self._record_team()
        self.seconds["load"] = time.perf_counter() - began

    def train(self) -> None:
        """The loop."""
        job, began, judging = self.loaded.job, time.perf_counter(), 0.0
        for batch in self.batches:
            outcome = self.team.forward_backward(self.model, batch, self.loss_sum)
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

    def end(self) -> RankResult:
        """The last proof, and what this rank has to tell."""
        began = time.perf_counter()
        fingerprint = self.prove() or self._own_fingerprint()
        sha256 = weights_sha256(self.model.module)
        apart = None if self.team.setting.sync else self.team.how_far_apart(self.model)
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
        recipe = recipe_of(self.loaded, device, self.batches.plan.split.samples, weights)
        self.team.agree(recipe)
        return recipe_hash(recipe)

    def _record_team(self) -> None:
        section, split = self.loaded.job.team, self.batches.plan.split
        if split.global_batch < section.shards:
            self._note(
                f"data.global_batch is {split.global_batch}: {section.shards - split.global_batch} of "
                f"{section.shards} shards have no samples"
            )
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
            )
        )

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.recorder.record(events.Noted(text))
