"""The watch of one rank: finds the script's DDP models and hands what they do to the detectors."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, Generic, Literal, ParamSpec

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dure.base.errors import DureError
from dure.base.run_folder import RunFolder
from dure.proof.detectors.board import Board, board_of_world
from dure.proof.detectors.ddp import ModelLook
from dure.proof.detectors.report import Report, Reporter
from dure.proof.detectors.samplers import SamplerLook
from dure.proof.detectors.saves import SavesLook

Mode = Literal["off", "warn", "strict"]
MODES = ("off", "warn", "strict")
_ONE_TOPIC = ("sync-lost", "no-sync", "replicas-apart")
"""The first of these explains the others."""
P = ParamSpec("P")


class Guarded(Generic[P]):
    """A hook that does nothing while torch.compile traces or after the watch has ended, and never fails."""

    def __init__(self, watch: Watch, look: Callable[P, Any]) -> None:
        self._watch, self._look = watch, look

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Look, if there is still a watch."""
        if torch.compiler.is_compiling() or not self._watch.on:
            return
        try:
            self._look(*args, **kwargs)
        except DureError:
            raise
        except Exception as error:  # a store that is gone, a tensor of a kind that nobody thought of
            self._watch.on, self._watch.trouble = False, error

    def __reduce__(self) -> Any:
        """A model that is copied or saved whole has a hook that does nothing, and needs no dure to be loaded."""
        return functools.partial, (sys.audit, "hook")


class Watch:
    """All that is looked at in this rank. Any trouble of its own ends the watch, never the script."""

    def __init__(self, mode: Mode, folder: RunFolder | None, name: str = "") -> None:
        """`name` tells watches of one process group apart."""
        self._name = name
        self._reporter = Reporter(folder, strict=mode == "strict")
        self._models: weakref.WeakKeyDictionary[DistributedDataParallel, ModelLook] = (
            weakref.WeakKeyDictionary()
        )
        self._made = 0
        self._board: Board | None = None
        self._told: set[str] = set()
        self.on = True
        self.trouble: Exception | None = None
        """What has ended the watch."""
        self.samplers = SamplerLook(self)
        self.saves = SavesLook(self, folder)

    def begin(self, *, all_models: bool) -> None:
        """Hang up the hooks: those that torch has, and DistributedSampler's two methods."""
        register_optimizer_step_pre_hook(self.guarded(self._before_update))
        if all_models:
            register_module_module_registration_hook(self.guarded(self._see_module))
        self.samplers.begin()
        self.saves.begin()

    def guarded(self, look: Callable[P, Any]) -> Guarded[P]:
        """A look as a hook that the script does not notice."""
        return Guarded(self, look)

    @property
    def board(self) -> Board | None:
        """Where ranks publish; None before the script has a process group, and on one rank."""
        if self._board is None:
            self._board = board_of_world(self._name)
        return self._board

    def tell(self, report: Report) -> None:
        """Tell a mistake, once over all ranks."""
        board = self.board
        topic = "sync" if report.kind in _ONE_TOPIC else report.kind
        if topic in self._told or board is None:
            return
        self._told.add(topic)
        if board.claim(topic):
            self._reporter.tell(report, board.rank)

    def add_model(self, model: DistributedDataParallel) -> None:
        """Look at a model from now on; all ranks make theirs in the same order."""
        if model not in self._models:
            self._models[model] = look = ModelLook(self, model, self._made)
            self._made += 1
            model.register_forward_pre_hook(self.guarded(look.before_forward), with_kwargs=True)
            model.register_forward_hook(self.guarded(look.after_forward))

    @property
    def in_evaluation(self) -> bool:
        """Whether the script evaluates, as far as one can see: no gradients are wanted, or no model trains."""
        models = [model for model in self._models if hasattr(model, "module")]
        return not torch.is_grad_enabled() or (
            bool(models) and not any(model.module.training for model in models)
        )

    @property
    def updates(self) -> int:
        """Updates of all models so far."""
        return sum(look.updates for look in self._models.values())

    def _see_module(self, owner: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
        if name == "module" and module is not None and isinstance(owner, DistributedDataParallel):
            self.add_model(owner)

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for model, look in list(self._models.items()):
            if whole_world(model):
                look.before_update(id(optimizer), own)


def whole_world(model: DistributedDataParallel) -> bool:
    """Whether all ranks train this model."""
    ranks = dist.get_process_group_ranks(model.process_group)
    return len(ranks) == dist.get_world_size()


_watch: Watch | None = None


def start(mode: Mode, folder: RunFolder | None = None, *, all_models: bool = True) -> Watch | None:
    """Watch this process from now on; without `all_models` those that `watch_model` is told of."""
    global _watch  # noqa: PLW0603
    if mode == "off":
        return None
    if _watch is None:
        _watch = Watch(mode, folder)
        _watch.begin(all_models=all_models)
    return _watch


def stop() -> None:
    """End the watch of this process: a team does by construction what is looked for."""
    if _watch is not None:
        _watch.on = False


def watch_model(model: DistributedDataParallel, mode: Mode) -> None:
    """Watch one DDP model that is there already."""
    watch = start(mode, all_models=False)
    if watch is not None:
        watch.add_model(model)
