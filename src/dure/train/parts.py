"""What a job names, made: the model with its weights, the batches, losses and measures."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from dure.base.errors import JobError
from dure.config import LoadedJob, factory
from dure.data.batches import Batches
from dure.observe import events
from dure.step import update
from dure.step.gathered import GATHERED, Gathered
from dure.step.loss import LOSSES, METRICS, LossSum, as_sum
from dure.team import Team
from dure.weights.load import Loaded, Progress

if TYPE_CHECKING:
    from torch.optim.swa_utils import AveragedModel


class Parts:
    """Makes the parts of one rank's run; `note` tells the user something."""

    def __init__(
        self, loaded: LoadedJob, team: Team, recorder: events.Recorder, note: Callable[[str], None]
    ) -> None:
        self._loaded = loaded
        self._team = team
        self._recorder = recorder
        self._note = note
        self._code: dict[str, str] = {}

    def loss(self) -> LossSum:
        """The loss, as sum and count."""
        self._note_code()
        return self._named(self._loaded.job.train.loss, "train.loss", LOSSES)

    def measures(self) -> dict[str, LossSum]:
        """The metrics of evaluation, by name."""
        return {name: self._named(name, "eval.metrics", METRICS) for name in self._loaded.job.eval.metrics}

    def gathered(self) -> dict[str, Gathered]:
        """The metrics of all samples' outputs at once, by name."""
        found: dict[str, Gathered] = {}
        for name in self._loaded.job.eval.gathered:
            if ":" not in name and name not in GATHERED:
                raise JobError(
                    f"eval.gathered: {name!r} is not known; use {', '.join(GATHERED)}, or a callable"
                )
            shown = name.partition(":")[2] or name
            found[shown] = GATHERED.get(name) or factory.find(name, "eval.gathered", self._loaded.folder)
        return found

    def average(self, module: torch.nn.Module) -> AveragedModel | None:
        """The moving average of the weights, at the start these; None without one. Its buffers are the model's."""
        decay = self._loaded.job.train.ema
        if decay is None:
            return None
        from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

        try:
            return AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(decay))
        except Exception as error:  # whatever a model's own __deepcopy__ raises
            raise JobError(
                f"train.ema is {decay}, but the model cannot be copied: {type(error).__name__}: {error}; leave "
                "train.ema out, or make the model one that copy.deepcopy takes"
            ) from error

    def optimizer(self, module: torch.nn.Module, *, some_unused: bool) -> torch.optim.Optimizer:
        """By name, or as the job's own factory makes it."""
        train = self._loaded.job.train
        if ":" not in train.optimizer:
            return update.make_optimizer(train, module, some_unused=some_unused)
        make = partial(
            factory.find(train.optimizer, "train.optimizer", self._loaded.folder), module, lr=train.lr
        )
        made = self._called("train.optimizer", train.optimizer, make, train.optimizer_args)
        return update.checked_optimizer(made, train.optimizer, module)

    def schedule(self, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
        """By name, or as the job's own factory makes it; None without one."""
        train = self._loaded.job.train
        if train.schedule is None or ":" not in train.schedule:
            return update.make_schedule(train, optimizer)
        make = partial(factory.find(train.schedule, "train.schedule", self._loaded.folder), optimizer)
        made = self._called("train.schedule", train.schedule, make, train.schedule_args)
        return update.checked_schedule(made, train.schedule)

    def hooks(self) -> Any:
        """What the job wants to be called, or None."""
        reference = self._loaded.job.hooks
        return self._make("hooks", reference, {}) if reference else None

    def eval_data(self) -> Any:
        """What the model is evaluated on, or None."""
        job = self._loaded.job
        if job.eval.factory is None:
            return None
        return self._make("eval.factory", job.eval.factory, job.eval.args)

    def collate(self) -> Any:
        """What joins samples into a batch, if the job says."""
        reference = self._loaded.job.data.collate
        return factory.find(reference, "data.collate", self._loaded.folder) if reference else None

    def batches(self) -> Batches:
        """This rank's shards of every batch."""
        data, train = self._loaded.job.data, self._loaded.job.train
        make = partial(self._make, "data.factory", data.factory, data.args)
        return self._team.batches(
            make(),
            global_batch=data.global_batch,
            epochs=train.epochs,
            steps=train.steps,
            shuffle=data.shuffle,
            split=data.split,
            workers=data.workers,
            accumulate=train.accumulate,
            collate=self.collate(),
            drop_last=data.drop_last,
            fresh=make,
            name="data.factory",
        )

    def model(self) -> tuple[torch.nn.Module, Loaded | None]:
        """From the seed alone (scenario B), or with pretrained weights (scenario A)."""
        wanted = self._loaded.job.model
        model: Any = self._loaded.arguments(wanted.args)
        if wanted.factory is not None:
            model = partial(self._make, "model.factory", wanted.factory, wanted.args)
        if wanted.weights is None:
            return model(), None
        loaded = self._team.loader.load(
            model,
            wanted.weights,
            how=wanted.load,
            strict=wanted.strict,
            storage=self._loaded.storage,
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
        self._recorder.record(
            events.WeightsLoaded(
                loaded.how,
                loaded.fingerprint,
                loaded.nbytes,
                dict(loaded.seconds),
                f"{loaded.built}; {loaded.way}",
            )
        )
        self._recorder.record(
            events.StorageUsed(
                rank=self._team.rank,
                location=loaded.location,
                what="weights",
                requests=int(used["read_requests"]),
                bytes=int(used["read_bytes"]),
                seconds=round(used["seconds"], 6),
            )
        )
        return loaded.module, loaded

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
                self._recorder.record(events.Loading(done, total, round(now - began, 3)))

        return show

    def code(self) -> dict[str, str]:
        """Digests of the user's own files that loss, model and data are written in, as they were imported: one that was
        changed since is refused. Files that only some ranks import count too. A collective call."""
        for name, digest in self._own_code().items():
            if self._code.setdefault(name, digest) != digest:
                raise JobError(
                    f"{name} was changed while the run started; what runs is not what is written there. Start again"
                )
        found: dict[str, str] = {}
        for rank, text in enumerate(self._team.group.gather(json.dumps(self._code), "comparing code")):
            for name, digest in json.loads(text).items():
                if found.setdefault(name, digest) != digest:
                    raise JobError(
                        f"{name} has other content on rank {rank} than on the ranks before; make them the same"
                    )
        return found

    def _note_code(self) -> None:
        """As soon as something was imported: its file may change while weights are loaded."""
        for name, digest in self._own_code().items():
            self._code.setdefault(name, digest)

    def _own_code(self) -> dict[str, str]:
        job = self._loaded.job
        references = {
            "model.factory": job.model.factory,
            "data.factory": job.data.factory,
            "data.collate": job.data.collate,
            "train.loss": job.train.loss,
            "train.optimizer": job.train.optimizer,
            "train.schedule": job.train.schedule,
            "hooks": job.hooks,  # they may change what is trained
        }
        named = {key: reference for key, reference in references.items() if reference and ":" in reference}
        return factory.own_code(named, self._loaded.folder)

    def _called(self, key: str, reference: str, make: Callable[..., Any], args: dict[str, Any]) -> Any:
        try:
            return make(**self._loaded.arguments(args))
        except Exception as error:
            raise JobError(f"{key}: {reference} raised {type(error).__name__}: {error}") from error

    def _make(self, key: str, reference: str, args: dict[str, Any]) -> Any:
        return factory.make(reference, key, self._loaded.folder, self._loaded.arguments(args))

    def _named(self, name: str, key: str, known: dict[str, LossSum]) -> LossSum:
        if name in known:
            return known[name]
        return as_sum(factory.find(name, key, self._loaded.folder), key)
