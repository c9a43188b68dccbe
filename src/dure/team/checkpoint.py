"""A script's checkpoints: what `dure train` does with its own, for a loop that somebody else wrote."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from dure import __version__
from dure.base.errors import CheckpointError, UsageError
from dure.base.files import write_whole
from dure.base.run_folder import RunFolder
from dure.base.say import say
from dure.checkpoint.export import export_module
from dure.checkpoint.manager import CheckpointManager
from dure.checkpoint.places import Places
from dure.checkpoint.run_parts import Ranks, Replica, Reporting, RunInfo
from dure.checkpoint.script_state import Extra, one_module, one_optimizer, one_schedule, optimizers_of
from dure.checkpoint.state import Sharing
from dure.comm.call_board import CallBoard
from dure.comm.raise_on_all import raise_on_all
from dure.comm.topology import read_run_folder
from dure.config import Checkpoint as Settings
from dure.data.batches import Batch, Batches
from dure.device.fingerprint import named_weights
from dure.observe import events
from dure.observe.heartbeat import Phase
from dure.proof.recipe import recipe_hash
from dure.proof.verify_replicas import prove_same
from dure.step.lockstep import StepResult
from dure.team.run_receipt import RunReceipt, head_of, state_tensors
from dure.team.script_recipe import script_recipe

if TYPE_CHECKING:
    from dure.team.team import Team

_ROOT_EVERY = 100
"""Steps between two hashes of the whole state in the receipt, as a job's train.receipt_every."""
_ASKS_TO_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True)
class Wanted:
    """What a script asks for."""

    model: Any
    optimizer: Any
    schedule: Any = None
    extra: dict[str, Any] | None = None
    every: int = 0
    every_seconds: float | None = None
    keep: int = 2
    keep_every: int = 0
    keep_best: str | None = None
    memory_every: int | Literal["auto"] = "auto"
    folder: str | Path | None = None
    rescue: str | Path | None = None
    any_recipe: bool = False
    receipt: bool = True

    def settings(self) -> Settings:
        """As `dure train` has them."""
        seconds = self.every_seconds
        if seconds is None:
            seconds = 0.0 if self.every else Settings().every_seconds
        try:
            return Settings(
                every_steps=self.every,
                every_seconds=seconds,
                keep=self.keep,
                keep_every=self.keep_every,
                keep_best=self.keep_best,
                memory_every=self.memory_every,
                rescue=None if self.rescue is None else str(self.rescue),
            )
        except ValueError as error:
            first = (
                error.errors()[0] if hasattr(error, "errors") else {"loc": ("settings",), "msg": str(error)}
            )
            name = {"every_steps": "every"}.get(str(first["loc"][0]), str(first["loc"][0]))
            raise UsageError(
                f"team.checkpoint: {name} is {getattr(self, name, '')!r}: {first['msg']}"
            ) from None


@dataclass
class _Loop:
    """How far one `team.batches` has come."""

    plan: dict[str, Any]
    steps: int = 0
    batches: Batches | None = None
    """None: of a state that was restored, and not begun yet in this process."""


@dataclass
class _Progress:
    """How far a script has come."""

    steps_done: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    evaluated: bool = False
    loops: list[_Loop] = field(default_factory=list)

    def to_facts(self) -> dict[str, Any]:
        """As a state holds it, besides the step."""
        return {"loops": [[loop.plan, loop.steps] for loop in self.loops]}

    def go_on_from(self, facts: Mapping[str, Any]) -> None:
        """Take over the progress of a state."""
        self.steps_done = int(facts["step"])
        try:
            self.loops = [_Loop(dict(plan), int(steps)) for plan, steps in facts["loops"]]
        except (KeyError, TypeError, ValueError):
            raise CheckpointError("it does not say how far its batches have come; is it of a job?") from None


class _Recorder(events.Recorder):
    """Also tells the user: nobody shows a script's events while it runs."""

    def record(self, event: events.Event) -> None:
        if isinstance(event, events.Noted):
            say(event.text)
        super().record(event)


class Checkpoint:
    """A script's checkpoints, made by `team.checkpoint`. All ranks call all methods, in step."""

    def __init__(self, team: Team, calls: CallBoard, wire: str, wanted: Wanted) -> None:
        if not team.setting.sync:
            raise UsageError(
                "sync is off: every rank has a model of its own, and no checkpoint could hold them"
            )
        settings = wanted.settings()
        if not settings.wanted:
            raise UsageError("team.checkpoint: every and every_seconds are 0, so nothing would ever be saved")
        self._team = team
        self._calls = calls
        self._keep_best = wanted.keep_best
        self._any_recipe = wanted.any_recipe
        self._module = one_module(wanted.model)
        self._models = wanted.model
        self._optimizer = one_optimizer(wanted.optimizer)
        self.extra: dict[str, Any] = {} if wanted.extra is None else wanted.extra
        """The values that are saved besides; a script may change them at any time, alike on all ranks."""
        self._extra = Extra(self.extra)
        self._places = _places(team, wanted, settings)
        recipe = script_recipe(team, wire, optimizers_of(self._optimizer))
        team.agree({"team.checkpoint": settings.model_dump(mode="json"), "folder": self._places.storage})
        self._progress = _Progress()
        self._flags: int | None = None
        self._reached: dict[int, int] = {}
        self._resumed = False
        self._before = {number: signal.getsignal(number) for number in _ASKS_TO_STOP}
        run = read_run_folder(os.environ)
        self._recorder = _Recorder(run.events(team.rank) if run is not None else None)
        facts = {
            "recipe": recipe_hash(recipe),
            "script": os.path.basename(sys.argv[0] or "python"),
            "seed": team.setting.seed,
            "shards": team.setting.shards,
            "threads": team.threads,
            "versions": {"dure": __version__, "torch": torch.__version__},
        }
        self._manager = CheckpointManager(
            settings,
            self._places,
            Ranks(team.topology, team.group, team.setting.device, team.setting.sync),
            Replica(
                self._module,
                self._optimizer,
                one_schedule(wanted.schedule),
                self._sharing,
                self._verify,
                self._extra,
            ),
            self._progress,
            RunInfo(None, None, recipe, facts, wanted.any_recipe),
            Reporting(self._recorder, team.heartbeat, self._note, self._before_saving),
        )
        self._schedule = one_schedule(wanted.schedule)
        self._recipe, self._wants_receipt = recipe, wanted.receipt
        self._receipt: RunReceipt | None = None
        self._passes: list[StepResult] = []
        """Of the step that `save_if_due` ends."""
        self._listen()
        if run is not None and team.topology.local_rank == 0:
            _announce(run, self._places)

    @property
    def step(self) -> int:
        """Steps done, counted by `save_if_due`."""
        return self._progress.steps_done

    def resume(self) -> int:
        """Go on from the newest state, if there is one; call it before the first step. Returns the steps done: 0 when
        the run begins. Any number of ranks goes on from what any other number saved; `team.batches` begins at the
        sample that comes next."""
        if self._resumed:
            raise UsageError("resume was called already; a script goes on once, before its first step")
        self._resumed = True
        with self._calls.inside("resume"):
            self._manager.resume()
            self._receipt = self._open_receipt() if self._wants_receipt else None
        return self.step

    def save_if_due(self, metrics: Mapping[str, float] | None = None) -> None:
        """After each step: keep the state in the launcher's memory and save it, each when due.

        `metrics` are of an evaluation after this very step, alike on all ranks, such as `team.evaluate(...).metrics`;
        with `keep_best` the state is saved now. Raises Resumable, with the state saved, when any rank was asked to stop
        (Ctrl-C, SIGTERM, SIGHUP, SIGUSR1): leave it alone, and the script ends with exit code 75.
        """
        flags, self._flags = self._flags, None
        if flags is None:
            if metrics is not None:
                raise UsageError(
                    "metrics are of the step before this call, and there was none since the last one; evaluate before "
                    "save_if_due, and give it what was found"
                )
            return  # no step since the last call
        for loop in self._progress.loops:
            loop.steps = self._reached.pop(id(loop.batches), loop.steps)
        self._progress.steps_done += 1
        self._note_metrics(metrics)
        passes, self._passes = self._passes, []
        if self._receipt is not None:
            self._receipt.after_step(self.step - 1, passes)
        with self._calls.inside("save_if_due", self.step):
            self._manager.save_if_due(flags)
            if self._team.is_corrupted:
                self._manager.save_last()
        self._team.refuse_to_go_on()
        self._team.heartbeat.beat(self.step, Phase.DATA)

    def _note_metrics(self, metrics: Mapping[str, float] | None) -> None:
        """Of an evaluation after this step; None where there was none."""
        found = {name: float(value) for name, value in (metrics or {}).items()}
        if metrics is not None:
            told = self._team.group.gather(json.dumps(found, sort_keys=True), "comparing metrics")
            odd = next((rank for rank, words in enumerate(told) if words != told[0]), None)
            if odd is not None:
                raise UsageError(
                    f"save_if_due was given the metrics {told[0]} on rank 0 and {told[odd]} on rank {odd}; give what "
                    "team.evaluate found, which is alike on all ranks"
                )
            if self._keep_best is not None and self._keep_best not in found:
                raise UsageError(
                    f"team.checkpoint: keep_best is {self._keep_best!r}, which is no metric; there are "
                    f"{', '.join(found) or 'none'}"
                )
        self._progress.metrics, self._progress.evaluated = found, metrics is not None

    def save(self) -> None:
        """Save the state as it is now, and wait until it is saved; CheckpointError when it could not be."""
        self._refuse_before_resume()
        with self._calls.inside("save"):
            trouble = self._manager.save_now()
        if trouble:
            raise CheckpointError(f"the checkpoint of step {self.step} could not be saved: {trouble}")

    def export(self, path: str | Path, *, model: str | int | None = None) -> None:
        """Write the weights alone as one safetensors file with the model's own names; rank 0 writes. Of several models,
        `model` says which; else their names come first."""
        module = self._module if model is None else one_module(self._models[model])

        def write() -> str:
            if self._team.is_leader:
                export_module(module, Path(path))
            return ""

        with self._calls.inside("export"):
            raise_on_all(self._team.group, "exporting weights", write)

    def first_step(self, batches: Batches) -> int:
        """At which step these batches begin: after the last one that the restored state has seen."""
        plan = _plan_of(batches)
        for loop in self._progress.loops:
            if loop.batches is None and loop.plan == plan:
                loop.batches = batches
                return loop.steps
        return 0

    def begin_step(self, batch: Batch) -> int:
        """Before a forward and backward pass: the flags of this rank."""
        self._refuse_before_resume()
        loops = self._progress.loops
        if all(loop.batches is not batch.source for loop in loops):
            plan, left = _plan_of(batch.source), [loop for loop in loops if loop.batches is None]
            if left and len(left) == len(loops):
                self._refuse_other_batches(left[0], plan)
            loops.append(_Loop(plan, 0, batch.source))
        return self._manager.step_flags()

    def end_step(self, batch: Batch, result: StepResult) -> None:
        """After a forward and backward pass; its flags are those of all ranks, OR-ed."""
        self._flags = result.flags | (self._flags or 0)
        if self._receipt is not None:
            self._passes.append(result)
        self._reached[id(batch.source)] = batch.step + 1

    def updating(self) -> contextlib.AbstractContextManager[None]:
        """Around an update: what still reads the replica has to be done with it."""
        return self._manager.updating()

    def finish(self, *, saves: bool) -> None:
        """Save the end of the run, unless something failed, and let go of the signals."""
        try:
            if saves and self._resumed and self.step > 0:
                self._manager.save_last()
                if self._receipt is not None:
                    self._receipt.end(self.step)
        finally:
            self._recorder.close()
            if threading.current_thread() is threading.main_thread():
                for number, handler in self._before.items():
                    signal.signal(number, handler)

    def _listen(self) -> None:
        """Signals that ask to stop do so at the next step; the second Ctrl-C is an ordinary one."""
        asked: list[int] = []

        def ask(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGINT and number in asked:
                raise KeyboardInterrupt
            asked.append(number)
            self._manager.ask_to_stop()

        for number in _ASKS_TO_STOP:
            if self._before[number] is not signal.SIG_IGN:  # nohup: what was ignored stays ignored
                signal.signal(number, ask)

    def _open_receipt(self) -> RunReceipt | None:
        """As `dure train` has one; beside the checkpoints, so that it is one chain with them. None where there is no
        folder for it, and where another recipe's state goes on."""
        run, place = read_run_folder(os.environ), self._places.storage
        within = run is not None and ("://" in place or Path(place).is_relative_to(run.path))
        folder = run if within else None if "://" in place else RunFolder(Path(place))
        if folder is None:
            return None
        for model in self._models.values() if isinstance(self._models, dict) else _listed(self._models):
            if isinstance(model, DistributedDataParallel):
                self._team.mark_gradients(model)
        module, optimizer, schedule = self._module, self._optimizer, self._schedule
        try:
            return RunReceipt(
                folder,
                head_of(self._recipe, self._team.setting.shards, _ROOT_EVERY),
                self.step,
                lambda: state_tensors(
                    module, optimizer, schedule, self._extra, sharded=self._sharing() is not None
                ),
                self._note,
                left_out=set(dict(named_weights(module))) - set(module.state_dict()),
                is_writer=self._team.is_leader,
                session={"ranks": self._team.topology.size, "host": socket.gethostname()},
            )
        except UsageError:
            if not self._any_recipe:
                raise
            self._note("the receipt ends here: the state that goes on is of another recipe")
            return None

    def _before_saving(self, steps_done: int) -> None:
        if self._receipt is not None:
            self._receipt.saving(steps_done)

    def _refuse_before_resume(self) -> None:
        if not self._resumed:
            raise UsageError(
                "there is a checkpoint, but its resume() was not called; call it before the first step: it goes on "
                "from what is saved, or begins"
            )

    def _refuse_other_batches(self, before: _Loop, plan: dict[str, Any]) -> None:
        changed = "; ".join(
            f"{key} was {before.plan.get(key)} and is {now}"
            for key, now in plan.items()
            if now != before.plan.get(key)
        )
        if not self._any_recipe:
            raise UsageError(
                f"the state has done {before.steps} steps of other batches ({changed or 'these begin anew'}); undo the "
                "change, or start anew in another folder (nothing is deleted)"
            )
        self._note(f"these batches are not those of the state, and begin at their first step: {changed}")

    def _sharing(self) -> Sharing | None:
        """Of several optimizers, the parts of all of them."""
        found = [self._team.sharing(optimizer) for optimizer in optimizers_of(self._optimizer)]
        known = [sharing for sharing in found if sharing is not None]
        if not known:
            return None
        if len(known) < len(found):
            raise UsageError("only some optimizers are sharded; shard all that one checkpoint holds, or none")
        parts = {part: whole for sharing in known for part, whole in sharing.parts.items()}
        return Sharing(parts, known[0].ranks, known[0].node, known[0].nodes)

    def _verify(self, step: int) -> None:
        """All of the state is the same on all ranks, or an error says what is not."""
        sharing, group = self._sharing(), self._team.group
        prove_same(self._module, self._optimizer, group, step, None if sharing is None else sharing.ranks)
        own = torch.nn.Module()
        for name, tensor in self._extra.tensors().items():
            own.register_buffer(name.replace(".", "/"), tensor)
        prove_same(own, None, group, step)

    def _note(self, text: str) -> None:
        if self._team.is_leader:
            self._recorder.record(events.Noted(text))


def _listed(models: Any) -> list[Any]:
    return list(models) if isinstance(models, list | tuple) else [models]


def _plan_of(batches: Batches) -> dict[str, Any]:
    """What tells these batches from others, whatever their number and the ranks'."""
    plan = batches.plan
    return {
        "samples": plan.split.samples,
        "global_batch": plan.split.global_batch,
        "split": plan.split.kind,
        "drop_last": plan.split.drop_last,
        "shuffle": plan.shuffle,
        "accumulate": plan.accumulate,
    }


def _places(team: Team, wanted: Wanted, settings: Settings) -> Places:
    run, folder = read_run_folder(os.environ), wanted.folder
    if folder is not None:
        place = str(folder) if "://" in str(folder) else str(Path(folder).absolute())
        rescue = settings.rescue
        return Places(run or RunFolder(Path(place)), place, rescue, is_run_given=False, is_script=True)
    if run is None:
        raise UsageError(
            "team.checkpoint: there is no run folder to save in; give folder=..., a folder or s3://bucket/prefix, or "
            "start the script with `dure run`"
        )
    if team.topology.nodes > 1:
        raise UsageError(
            "team.checkpoint: on several nodes give folder=..., a folder that all of them see, or s3://bucket/prefix"
        )
    return Places(run, str(run.path / settings.folder), settings.rescue, is_script=True)


def _announce(run: RunFolder, places: Places) -> None:
    """Tell the launcher that this script saves, so that it is asked to stop, and started again when it dies."""
    place = places.storage
    if "://" not in place and Path(place).is_relative_to(run.path):
        place = str(Path(place).relative_to(run.path))  # the folder may be moved
    told = {"script": sys.argv[0], "checkpoints": place}
    try:
        write_whole(run.script, json.dumps(told) + "\n")
    except OSError as error:
        say(
            f"{run.script} cannot be written ({error.strerror}): the launcher does not know that this script saves"
        )
