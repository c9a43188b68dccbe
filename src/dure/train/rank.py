"""One rank's part of `dure train`: wire the rooms together; the loop is one screen long."""

from __future__ import annotations

import math
import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from dure import __version__
from dure.base.errors import ComputedWrongly
from dure.base.run_folder import RunFolder
from dure.checkpoint.manager import CheckpointManager
from dure.checkpoint.places import Places
from dure.checkpoint.run_parts import Ranks, Replica, Reporting, RunInfo
from dure.checkpoint.script_state import Extra
from dure.checkpoint.state import AVERAGE
from dure.config import LoadedJob
from dure.data.batches import MANY_IDS, Batch
from dure.device.accelerator import is_host
from dure.device.fingerprint import named_weights, weights_sha256
from dure.observe import events, results
from dure.observe.heartbeat import Phase
from dure.observe.results import RankResult
from dure.proof.arithmetic import agree_on_arithmetic, arithmetic_fingerprint
from dure.proof.proof_cadence import ProofCadence
from dure.proof.recipe import recipe_hash, recipe_of
from dure.proof.sample_contents import SampleContents
from dure.proof.verify_replicas import fingerprints_of, whole_fingerprint
from dure.step.first_probe import probe_on
from dure.step.lockstep import StepResult
from dure.team import Team, start
from dure.team.run_receipt import RunReceipt, head_of, state_tensors
from dure.train.checks import Checks
from dure.train.hooks import HookCalls, Moment
from dure.train.job_log import JobLog
from dure.train.parts import Parts
from dure.train.progress import Progress

_MEMORY_SECONDS = 5.0
"""Between two looks at how much memory the rank holds."""


def run_rank(job_text: str, run_path: str) -> RankResult:
    """The entry point of every rank: train the job, from joining the team to the last proof."""
    began = time.perf_counter()
    loaded = LoadedJob.from_json(job_text)
    section, train = loaded.job.team, loaded.job.train
    with start(
        seed=train.seed,
        shards=section.shards,
        threads=section.threads,
        arithmetic=section.arithmetic,
        device=section.device,
        sync=section.sync,
        precision=train.precision,
        wire=loaded.job.reduce.wire,
        transport=loaded.job.reduce.transport,
        hang_seconds=section.hang_seconds,
        audit=train.audit,
        on_corruption=train.on_corruption,
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
    samples_seen: int = 0
    at: Progress = field(default_factory=Progress)
    saving_seconds: float = 0.0
    """Of this thread, since the last step was recorded."""
    _memory_at: float = -math.inf

    def __post_init__(self) -> None:
        began = time.perf_counter()
        self.team.heartbeat.beat(0, Phase.LOADING)
        job, parts = self.loaded.job, Parts(self.loaded, self.team, self.recorder, self._note)
        self.loss_sum = parts.loss()
        module, self.weights = parts.model()
        self.team.verify_start(module)
        self.arithmetic = self._agree_on_arithmetic(module)
        self.batches = parts.batches()
        split = self.batches.plan.split
        self.at.ledger.uses_all = split.samples_of_epoch == split.samples
        self.at.ledger.alone = not self.team.setting.sync
        self.collate, self.code = parts.collate(), parts.code()
        self.eval_data, self.measures = parts.eval_data(), parts.measures()
        self.gathered = parts.gathered()
        self.model = self._replicate(module)
        if self.eval_data is not None:
            self.team.rehearse_evaluation(
                self.model,
                self.eval_data,
                {"loss": self.loss_sum, **self.measures},
                batch=job.eval.batch or job.data.global_batch,
                collate=self.collate,
                fresh=parts.eval_data,
                gathered=self.gathered,
                name="eval.factory",
            )
        self.average = parts.average(module)
        self.optimizer = parts.optimizer(module, some_unused=self.some_unused)
        if job.train.shard_optimizer:
            self.team.shard_optimizer(
                self.model, self.optimizer, share_weights=True, own_gradients=job.train.clip_norm is None
            )
        self.schedule = parts.schedule(self.optimizer)
        self.hooks = HookCalls(parts.hooks(), self.team)
        self.log = JobLog(self.loaded, self.folder, self.team, self.recorder)
        self.recipe = self._agree_on_recipe()
        self.checkpoints = self._checkpoint_manager()
        self.checkpoints.resume()
        self.receipt = self._open_receipt()
        self.start = self.at.steps_done
        self.checks = Checks(self.team, self._prove, self.recorder, job.train.prove_every, self.start)
        self.batches = self.batches.starting_at(self.batches.steps if self.at.stopped else self.start)
        samples = self.batches.plan.split.samples if self.team.setting.sync else 0
        self.contents = SampleContents(self.folder.samples, samples, self.team.group, self.batches.content)
        self._record_team()
        self.seconds["load"] = time.perf_counter() - began

    def train(self) -> None:
        """The loop."""
        began, evaluating = time.perf_counter(), 0.0
        self._call("on_start")
        for batch in self.batches:
            self.contents.check(batch.epoch, batch.ids, batch.contents)
            result = self.forward_backward(batch)
            norm, update_seconds = self.update()
            spent = batch.waited_seconds + result.compute_seconds + result.exchange_seconds
            self.checks.after_update(batch.step, spent + update_seconds)
            self.record(batch, result, norm, update_seconds)
            self._call("on_step")
            evaluating += self.evaluate_if_due(batch)
            if batch.last_of_epoch:
                self.contents.end_epoch()
            if self.save_if_due(result.flags):
                self._call("on_save")
            self.checks.end_if_corrupted(self.checkpoints.save_last)
            if self.at.stopped:
                break
            self.team.heartbeat.beat(batch.step + 1, Phase.DATA)
        self.seconds["train"] = time.perf_counter() - began - evaluating
        if not self.at.evaluated:
            self.checkpoints.begin_last()  # whatever the evaluation comes to, the training is not lost
            evaluating += self.evaluate()
        self.seconds["eval"] = evaluating
        self._call("on_end")

    def forward_backward(self, batch: Batch) -> StepResult:
        """Compute the step's gradients."""
        try:
            return self.team.forward_backward(self.model, batch, self.loss_sum, self.checkpoints.step_flags())
        except ComputedWrongly as wrong:  # twice in this step: there will be no event of it
            self._note(str(wrong))
            raise

    def update(self) -> tuple[float | None, float]:
        """Update the replica; returns the gradients' norm, if it was clipped, and the seconds it took."""
        began = time.perf_counter()
        with self.checkpoints.updating():
            norm = self.team.update(
                self.model,
                self.optimizer,
                schedule=self.schedule,
                clip_norm=self.loaded.job.train.clip_norm,
                ema=self.average,
            )
        return norm, time.perf_counter() - began

    def evaluate_if_due(self, batch: Batch) -> float:
        """After so many epochs or steps; the run's last evaluation comes after its last checkpoint was begun."""
        settings = self.loaded.job.eval
        epochs = batch.epoch + 1 if batch.last_of_epoch else 0
        by_epochs = settings.every_epochs and epochs and epochs % settings.every_epochs == 0
        by_steps = settings.every_steps and self.at.steps_done % settings.every_steps == 0
        if self.at.steps_done == self.batches.steps or not (by_epochs or by_steps):
            return 0.0
        seconds = self.evaluate()
        # Metrics are the same bits on all ranks, so all of them stop after the same step.
        if self.at.ends_early(settings):
            self._note(
                f"ended early after step {self.at.steps_done} of {self.batches.steps}: {settings.stop_on} was not "
                f"better than {self.at.best} in {settings.stop_after} evaluation(s)"
            )
        return seconds

    def record(self, batch: Batch, result: StepResult, norm: float | None, update_seconds: float) -> None:
        """Record the step's result; costs the training thread some microseconds."""
        self.at.loss = result.loss
        self.at.steps_done = batch.step + 1
        self.at.ledger.add(result.samples, result.mark, ends_epoch=batch.last_of_epoch)
        self.receipt.after_step(batch.step, [result])
        few = len(batch.ids) <= MANY_IDS
        self.samples_seen += len(batch.ids)
        self.recorder.record(
            events.Stepped(
                epoch=batch.epoch,
                step=batch.step,
                loss=result.loss,
                samples=len(batch.ids),
                samples_of_batch=batch.size,
                seconds={
                    "save": round(self.saving_seconds, 6),
                    "data": round(batch.waited_seconds, 6),
                    "compute": round(result.compute_seconds, 6),
                    "exchange": round(result.exchange_seconds, 6),
                    "wait": round(result.wait_seconds, 6),
                    "update": round(update_seconds, 6),
                },
                lr=self.optimizer.param_groups[0]["lr"],
                grad_norm=norm,
                ids=batch.ids if few else None,
                mark=None if few else f"{batch.mark:016x}",
            )
        )
        self.checks.record(batch.step, result.audited)
        self.log.step(batch.step, result.loss, norm, self.optimizer)
        self.saving_seconds = 0.0
        if time.monotonic() - self._memory_at >= _MEMORY_SECONDS:
            self._memory_at = time.monotonic()
            self.recorder.record(events.MemoryUsed(batch.step, _resident_bytes()))

    def save_if_due(self, flags: int) -> bool:
        """Keep or save the run's state, as far as a step asks for it; most of that is done off this thread.
        Returns whether a checkpoint was begun."""
        began = time.perf_counter()
        saved = self.checkpoints.save_if_due(flags)
        self.saving_seconds += time.perf_counter() - began
        return saved

    def _prove(self, step: int, cadence: ProofCadence | None = None) -> str:
        if self.average is not None:
            self.team.prove(self.average, None, step)
        return self.team.prove_and_measure(self.model, self.optimizer, step, cadence)

    def evaluate(self) -> float:
        """Evaluate the model, if the job says on what; returns the seconds it took."""
        began = time.perf_counter()
        if self.eval_data is not None:
            job = self.loaded.job
            found = self.team.evaluate(
                self.model if self.average is None else self.average,
                self.eval_data,
                {"loss": self.loss_sum, **self.measures},
                batch=job.eval.batch or job.data.global_batch,
                workers=job.data.workers,
                collate=self.collate,
                gathered=self.gathered,
            )
            self.at.metrics, self.at.evaluated_after = found.metrics, self.at.steps_done
            self.at.ledger.add_evaluation(found.samples_of_all, found.mark_of_all, len(self.eval_data))
            self.recorder.record(
                events.Evaluated(
                    self.at.steps_done - 1,
                    found.metrics,
                    found.samples,
                    len(self.eval_data),
                    f"{found.mark:016x}",
                )
            )
            self.log.evaluation(self.at.steps_done - 1, found.metrics)
            self._call("on_eval")
        return time.perf_counter() - began

    def _call(self, name: str) -> None:
        """The job's own hook, if it has one."""
        if name in self.hooks:
            at, model = self.at, self.model.module
            self.hooks(
                name, Moment(self.team, model, self.optimizer, at.steps_done, at.loss, dict(at.metrics))
            )

    def end(self) -> RankResult:
        """The last proof, the last checkpoint, and what this rank has to tell."""
        began = time.perf_counter()
        fingerprint = self.checks.last(self.at.steps_done - 1)
        if fingerprint is None:
            fingerprint = whole_fingerprint(fingerprints_of(self.model.module, self.optimizer))
        sha256 = weights_sha256(self.model.module)
        apart = None if self.team.setting.sync else self.team.how_far_apart(self.model)
        self.checkpoints.save_last()
        self.receipt.end(self.at.steps_done)
        self.recorder.record(events.Ended(self.at.steps_done, fingerprint, sha256, self.recorder.lost))
        self.recorder.close()
        self.seconds["prove"] = time.perf_counter() - began
        split = self.batches.plan.split
        return RankResult(
            rank=self.team.rank,
            steps=self.at.steps_done,
            epochs=self.at.steps_done // split.steps,
            loss=self.at.loss,
            metrics=self.at.metrics,
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
            audited=self.checks.audited,
            loaded=self._loaded(),
            ledger=self.at.ledger.to_plain(),
            storage=self.recorder.storage,
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

    def _checkpoint_manager(self) -> CheckpointManager:
        team, optimizer = self.team, self.optimizer
        facts = {
            "recipe": self.recipe,
            "job": self.loaded.to_json(),
            "seed": team.setting.seed,
            "shards": team.setting.shards,
            "threads": team.threads,
            "versions": {"dure": __version__, "torch": torch.__version__},
        }
        return CheckpointManager(
            self.loaded.job.checkpoint,
            Places.of_job(self.loaded, self.folder),
            Ranks(team.topology, team.group, team.setting.device, team.setting.sync),
            Replica(
                self.model.module,
                optimizer,
                self.schedule,
                lambda: team.sharing(optimizer),
                self._prove,
                Extra({}) if self.average is None else Extra({AVERAGE: self.average}),
            ),
            self.at,
            RunInfo(self.batches.steps, self.batches.plan.split.steps, self.recipe_words, facts),
            Reporting(self.recorder, team.heartbeat, self._note, self._before_saving),
        )

    def _before_saving(self, steps_done: int) -> None:
        self.receipt.saving(steps_done)

    def _open_receipt(self) -> RunReceipt:
        """Rank 0 writes it; all ranks then tell what their shards' gradients are."""
        team = self.team
        if team.setting.sync:
            team.mark_gradients(self.model)
        module, optimizer, schedule = self.model.module, self.optimizer, self.schedule
        return RunReceipt(
            self.folder,
            head_of(self.recipe_words, team.setting.shards, self.loaded.job.train.receipt_every),
            self.at.steps_done,
            lambda: state_tensors(module, optimizer, schedule, sharded=bool(team.sharing(optimizer))),
            self._note,
            left_out=set(dict(named_weights(module))) - set(module.state_dict()),
            is_writer=team.is_leader and team.setting.sync,
            session={"ranks": team.topology.size, "host": socket.gethostname()},
        )

    def _replicate(self, module: torch.nn.Module) -> DistributedDataParallel:
        """Probe the model on its first shard, so that DDP is told what it needs to know; then wrap it."""
        first = next(iter(self.batches.first_only()))
        known = probe_on(module, first, self.loss_sum, self.team.setting, self.team.group)
        self.first_samples, _ = known.common
        wanted = self.loaded.job.model.find_unused
        find_unused = bool(known.unused) if wanted == "auto" else wanted
        self.some_unused = bool(known.unused)
        if known.unused and find_unused:
            self._note(f"{len(known.unused)} parameters take no part in some shards ({known.unused[0]}, …)")
        return self.team.replicate(module, find_unused=find_unused, known=known)

    def _agree_on_arithmetic(self, module: torch.nn.Module) -> dict[str, str]:
        """In the dtypes that the model computes in; before anything is computed that could differ."""
        used = {p.dtype for p in module.parameters() if p.is_floating_point()}
        if self.loaded.job.train.precision == "bf16":
            used.add(torch.bfloat16)
        device = self.team.setting.device
        if not self.team.setting.sync:
            return arithmetic_fingerprint(device, used)
        return agree_on_arithmetic(self.team.group, device, used)

    def _agree_on_recipe(self) -> str:
        device = self.team.setting.device
        weights = None
        if self.weights is not None:
            weights = {"fingerprint": self.weights.fingerprint, "config": self.weights.config}
        samples = self.batches.plan.split.samples
        self.recipe_words = recipe_of(
            self.loaded, device, samples, self.code, self.arithmetic, self.first_samples, weights
        )
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
        if self.loaded.job.train.audit and self.team.topology.size == 1:
            self._note(
                "train.audit on one rank: shards are computed again on the same machine, which cannot show that it is "
                "always wrong"
            )
        cores = len(os.sched_getaffinity(0))
        busy = self.team.topology.local_size * section.threads
        if is_host(self.team.setting.device) and busy < cores:
            self._note(
                f"{cores - busy} of {cores} cores are idle; --ranks {min(cores // section.threads, section.shards)} "
                "uses them with the same bits"
            )
        self.recorder.record(
            events.TeamFormed(
                rank=self.team.rank,
                ranks=self.team.topology.size,
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
                node=self.team.topology.node,
            )
        )

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.recorder.record(events.Noted(text))


def _resident_bytes() -> int:
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:  # no /proc in some sandboxes
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
