"""The update: optimizer and schedule by torch's names, and clipping."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from dure.base.errors import JobError
from dure.config import Train

_REFUSED_OPTIMIZERS = {
    "LBFGS": "it evaluates the model several times per step",
    "SparseAdam": "it needs sparse gradients, which the tree cannot add",
}
_REFUSED_SCHEDULES = {"ReduceLROnPlateau": "it is not a function of the step"}
_OF_OTHERS = ("SequentialLR", "ChainedScheduler")
"""Schedules made of schedules."""


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


def checked_optimizer(made: object, reference: str, module: torch.nn.Module) -> torch.optim.Optimizer:
    """What a job's own factory made, if it is an optimizer of the model's parameters."""
    if not isinstance(made, torch.optim.Optimizer):
        raise JobError(
            f"train.optimizer: {reference} returned a {type(made).__name__}, not a torch.optim.Optimizer"
        )
    kind = next((name for name in _REFUSED_OPTIMIZERS if type(made).__name__ == name), None)
    if kind is not None:
        raise JobError(f"train.optimizer: {kind} is refused: {_REFUSED_OPTIMIZERS[kind]}")
    own = {id(parameter) for parameter in module.parameters()}
    for parameter in (p for group in made.param_groups for p in group["params"]):
        if id(parameter) not in own:
            raise JobError(
                f"train.optimizer: {reference} has a parameter of shape {tuple(parameter.shape)} that is not the "
                "model's"
            )
    return made


def make_schedule(train: Train, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    """The job's learning-rate schedule, to be stepped once per step."""
    if train.schedule is None:
        return None
    return _schedule(train.schedule, dict(train.schedule_args), optimizer, "train.schedule")


def checked_schedule(made: Any, reference: str) -> LRScheduler:
    """What a job's own factory made, if it can be stepped, saved and restored."""
    missing = [
        name for name in ("step", "state_dict", "load_state_dict") if not callable(getattr(made, name, None))
    ]
    if missing:
        raise JobError(
            f"train.schedule: {reference} returned a {type(made).__name__} without {', '.join(missing)}; a schedule is "
            "stepped once per step, saved and restored"
        )
    refused = next((name for name in _REFUSED_SCHEDULES if type(made).__name__ == name), None)
    if refused is not None:
        raise JobError(f"train.schedule: {refused} is refused: {_REFUSED_SCHEDULES[refused]}")
    return made  # type: ignore[no-any-return]


def _schedule(name: str, args: dict[str, Any], optimizer: torch.optim.Optimizer, key: str) -> LRScheduler:
    module = torch.optim.lr_scheduler
    kind = _by_name(module, LRScheduler, name, key, _REFUSED_SCHEDULES)
    try:
        if name not in _OF_OTHERS:
            return kind(optimizer, **args)  # type: ignore[no-any-return]
        inner = args.pop("schedulers", None)
        if not isinstance(inner, list) or not all(isinstance(one, dict) and "name" in one for one in inner):
            raise JobError(
                f"{key}_args.schedulers of {name} is {inner!r}; write a list of tables, such as "
                '[{ name = "LinearLR", start_factor = 0.1, total_iters = 100 }, …]'
            )
        nested = next((one["name"] for one in inner if one["name"] in _OF_OTHERS), None)
        if nested is not None:
            raise JobError(
                f"{key}_args.schedulers of {name} has a {nested}; torch cannot put one into the other"
            )
        made = [
            _schedule(one["name"], {k: v for k, v in one.items() if k != "name"}, optimizer, key)
            for one in inner
        ]
        if name == "SequentialLR":
            return kind(optimizer, made, **args)  # type: ignore[no-any-return]
        return kind(made, **args)  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        raise JobError(f"{key}_args do not fit {name}: {error}") from error


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
