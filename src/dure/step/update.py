"""The update: optimizer and schedule by torch's names, and clipping."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Iterable
from typing import Any

import torch

from dure.base.errors import JobError
from dure.config import Train

_REFUSED_OPTIMIZERS = {
    "LBFGS": "it evaluates the model several times per step",
    "SparseAdam": "it needs sparse gradients, which the tree cannot add",
}
_REFUSED_SCHEDULES = {"ReduceLROnPlateau": "it is not a function of the step"}


def make_optimizer(
    train: Train, module: torch.nn.Module, *, some_unused: bool = False
) -> torch.optim.Optimizer:
    """The job's optimizer over the parameters that require gradients, fused where torch offers it and is right.

    `some_unused`: the run's first batch does not use every parameter.
    """
    kind = _by_name(
        torch.optim, torch.optim.Optimizer, train.optimizer, "train.optimizer", _REFUSED_OPTIMIZERS
    )
    arguments: dict[str, Any] = {"lr": train.lr, **train.optimizer_args}
    if "fused" in inspect.signature(kind).parameters and "foreach" not in arguments:
        wrong = _why_fused_is_wrong(kind, train, module, some_unused)
        if wrong and arguments.get("fused"):
            raise JobError(f"train.optimizer_args: fused = true is refused: {wrong}; leave it out")
        arguments.setdefault("fused", not wrong)
    try:
        made: torch.optim.Optimizer = kind(_groups(train, module), **arguments)
        return made
    except (TypeError, ValueError, RuntimeError) as error:
        raise JobError(f"train.optimizer_args do not fit {train.optimizer}: {error}") from error


def _why_fused_is_wrong(kind: type, train: Train, module: torch.nn.Module, some_unused: bool) -> str:
    """Why torch's fused form of this optimizer must not be used here; "" when it may."""
    settings = [train.optimizer_args, *(group.args for group in train.groups)]
    if kind is not torch.optim.SGD or not any(each.get("momentum") for each in settings):
        return ""
    if any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in module.parameters()):
        return "on CPUs it leaves parts of a low-precision momentum as they were in memory, unwritten"
    if some_unused:
        return "it fails where a parameter gets its first gradient, and so its momentum, later than others"
    return ""


def make_schedule(
    train: Train, optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """The job's learning-rate schedule, to be stepped once per step."""
    if train.schedule is None:
        return None
    module = torch.optim.lr_scheduler
    kind = _by_name(module, module.LRScheduler, train.schedule, "train.schedule", _REFUSED_SCHEDULES)
    try:
        return kind(optimizer, **train.schedule_args)  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        raise JobError(f"train.schedule_args do not fit {train.schedule}: {error}") from error


def clip(parameters: Iterable[torch.nn.Parameter], limit: float | None) -> float | None:
    """Scale gradients down to a norm of at most `limit`; returns the norm they had.

    All ranks hold the same gradients, so all compute the same norm: nothing is exchanged.
    """
    if limit is None:
        return None
    return float(torch.nn.utils.clip_grad_norm_(parameters, limit))


def _groups(train: Train, module: torch.nn.Module) -> list[dict[str, Any]]:
    """Parameters by the first group whose pattern matches, the rest in a group without changes."""
    members: list[list[torch.nn.Parameter]] = [[] for _ in range(len(train.groups) + 1)]
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            matching = (at for at, group in enumerate(train.groups) if fnmatch.fnmatchcase(name, group.match))
            members[next(matching, len(train.groups))].append(parameter)
    for group, found in zip(train.groups, members, strict=False):
        if not found:
            raise JobError(f"train.groups: no trainable parameter is named like {group.match!r}")
    settings = [*(dict(group.args) for group in train.groups), {}]
    return [{"params": found, **args} for found, args in zip(members, settings, strict=True) if found]


def _by_name(module: Any, base: type, name: str, key: str, refused: dict[str, str]) -> Any:
    """A class of a torch module, or an error that lists what there is."""
    if name in refused:
        raise JobError(f"{key} = {name!r} is refused: {refused[name]}")
    offered = {
        found: kind
        for found, kind in vars(module).items()
        if inspect.isclass(kind) and issubclass(kind, base) and kind is not base and not found.startswith("_")
    }
    if name not in offered:
        raise JobError(
            f"{key} = {name!r} is not there; torch has {', '.join(sorted(set(offered) - set(refused)))}"
        )
    return offered[name]
