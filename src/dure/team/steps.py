"""What a step of a script is made of: its loss, its optimizers and schedules, and what they may not be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from dure.base.errors import UsageError
from dure.step.evaluation import Measures
from dure.step.forward import Forward, PartLoss, WholeLoss, modules_beside
from dure.step.gathered import GATHERED, Gathered
from dure.step.lockstep import Lockstep, Steps
from dure.step.loss import LossSum, as_sum

Loss = Callable[[Any, Any], Any] | Literal["cross_entropy", "mse"]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
Schedules = Steps | Sequence[Steps] | None


class Averages(Protocol):
    """A moving average of a model, such as torch.optim.swa_utils.AveragedModel."""

    def update_parameters(self, model: torch.nn.Module) -> None:
        """Once after each update."""
        ...


class Replicas:
    """The replicas of a team, and how often each batch was computed."""

    def __init__(self) -> None:
        self._locksteps: dict[int, Lockstep] = {}
        self._passes = (-1, 0)
        """(step, losses that were computed from its batch)."""
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        """Those that were looked at."""

    def add(self, lockstep: Lockstep) -> DistributedDataParallel:
        """Keep a replica's lockstep; returns the replica."""
        self._locksteps[id(lockstep.model)] = lockstep
        return lockstep.model

    def lockstep(self, model: object) -> Lockstep:
        """Of a replica; UsageError for anything else."""
        found = self._locksteps.get(id(model))
        if found is not None:
            return found
        if isinstance(model, list | tuple | dict):
            raise UsageError(
                f"a step trains one replica, not a {type(model).__name__} of them; put models that share a loss into "
                "one module, team.replicate(torch.nn.ModuleDict({...})), and give each model with a loss of its own a "
                "step of its own"
            )
        raise UsageError("this model is not of this team; use what team.replicate returned")

    def loss(
        self, model: object, step: int, loss: Loss | LossSum | None, forward: Forward | None
    ) -> PartLoss:
        """What a step computes: a loss of (output, target), or a function over the whole micro-batch."""
        if (loss is None) == (forward is None):
            raise UsageError(
                "give a loss of (output, target), or forward=, a function of (model, batch): one of them"
            )
        if forward is None:
            return as_sum(loss)  # type: ignore[arg-type]
        if not callable(forward):
            raise UsageError(f"forward is a {type(forward).__name__}; give a function of (model, batch)")
        number = self._passes[1] + 1 if self._passes[0] == step else 0
        self._passes = (step, number)
        own = self.lockstep(model).model
        replicas = tuple(lockstep.model for lockstep in self._locksteps.values())
        beside = [replica.module for replica in replicas if replica is not own]
        beside += [other for other in modules_beside(forward, own.module) if other not in beside]
        return WholeLoss(forward, tuple(beside), replicas, number)

    def accept(self, optimizer: torch.optim.Optimizer) -> None:
        """One whose parameters are parts of a replica's from now on."""
        self._optimizers[id(optimizer)] = optimizer

    def optimizers(self, given: Optimizers) -> list[torch.optim.Optimizer]:
        """Those of an update; refused by name where an update would not be the same on all ranks."""
        optimizers = [given] if isinstance(given, torch.optim.Optimizer) else list(given)
        for optimizer in optimizers:
            if id(optimizer) not in self._optimizers:
                self._refuse(optimizer)
                self._optimizers[id(optimizer)] = optimizer
        return optimizers

    def _refuse(self, optimizer: object) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(
                "LBFGS evaluates the model several times per step; use an optimizer that needs no closure"
            )
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"the optimizer is a {type(optimizer).__name__}; give a torch.optim.Optimizer, or several"
            )
        models = [lockstep.model for lockstep in self._locksteps.values()]
        known = {id(parameter) for model in models for parameter in model.parameters()}
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if id(parameter) not in known:
                raise UsageError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that no replica has: its "
                    "gradient would be this rank's alone. Make it a part of the module that is given to team.replicate"
                )

    def close(self) -> None:
        """End the communication threads."""
        for lockstep in self._locksteps.values():
            lockstep.close()
        self._locksteps.clear()
        self._optimizers.clear()


def schedules_in(given: Schedules) -> list[Steps]:
    """Those of an update, each an object with `step`."""
    schedules: list[Any] = (
        [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
    )
    for schedule in schedules:
        if not callable(getattr(schedule, "step", None)):
            raise UsageError(
                f"the schedule is a {type(schedule).__name__}; give an object with a method `step`"
            )
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise UsageError(
                "ReduceLROnPlateau steps by a metric; call its step(metric) yourself after team.evaluate, whose "
                "metrics are the same on all ranks"
            )
    return schedules


def plain_module(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside a replica; a module that is none, such as a moving average, as it is."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def measures_of(
    means: Mapping[str, Loss | LossSum],
    gathered: Mapping[str, Gathered | str] | Iterable[str],
    forward: Callable[[Any, Any], tuple[Any, Any]] | None,
) -> Measures:
    """What a user wants to know of a model."""
    summed = {name: as_sum(measure, "the measure") for name, measure in means.items()}
    wanted = gathered if isinstance(gathered, Mapping) else {name: name for name in gathered}
    return Measures(summed, {name: _gathered(one) for name, one in wanted.items()}, forward)


def _gathered(measure: Gathered | str) -> Gathered:
    if callable(measure):
        return measure
    if measure not in GATHERED:
        raise UsageError(
            f"the metric {measure!r} over all samples is not known; use {', '.join(GATHERED)}, or a function"
        )
    return GATHERED[measure]
