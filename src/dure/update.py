"""The update: optimizer and schedule by torch's names, clipping, and parameters that no shard used."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dure.errors import JobError
from dure.job import Train

_REFUSED_OPTIMIZERS = {
    "LBFGS": "it evaluates the model several times a step",
    "SparseAdam": "it needs sparse gradients, which the tree cannot add",
}
_REFUSED_SCHEDULES = {"ReduceLROnPlateau": "it is not a function of the step"}


def make_optimizer(train: Train, module: torch.nn.Module) -> torch.optim.Optimizer:
    """The job's optimizer over the parameters that require gradients, fused where torch offers it."""
    kind = _by_name(
        torch.optim, torch.optim.Optimizer, train.optimizer, "train.optimizer", _REFUSED_OPTIMIZERS
    )
    arguments: dict[str, Any] = {"lr": train.lr, **train.optimizer_args}
    if "fused" in inspect.signature(kind).parameters and "foreach" not in arguments:
        arguments.setdefault("fused", not _fused_is_wrong(kind, arguments, module))
    try:
        made: torch.optim.Optimizer = kind(_groups(train, module), **arguments)
        return made
    except (TypeError, ValueError, RuntimeError) as error:
        raise JobError(f"train.optimizer_args do not fit {train.optimizer}: {error}") from error


def _fused_is_wrong(kind: type, arguments: dict[str, Any], module: torch.nn.Module) -> bool:
    """On CPUs, torch's fused SGD leaves parts of a low-precision momentum as they were in memory, unwritten."""
    low = any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in module.parameters())
    return kind is torch.optim.SGD and low and bool(arguments.get("momentum"))


def make_schedule(
    train: Train, optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """The job's learning-rate schedule, to be stepped once a step."""
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


class UsedParameters:
    """Which parameters took part in a step, where some may not: those that no shard used are left alone by
    the update, so that decay and momentum skip them."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self.used = torch.zeros(len(self._parameters), dtype=torch.uint8)
        for at, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(lambda _, at=at: self._mark(at))

    def _mark(self, at: int) -> None:
        self.used[at] = 1

    def hide_unused(self) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Take the gradient off every unused parameter; returns what `put_back` needs."""
        hidden = []
        for parameter, used in zip(self._parameters, self.used.tolist(), strict=True):
            if not used and parameter.grad is not None:
                hidden.append((parameter, parameter.grad))
                parameter.grad = None
        return hidden


def put_back(hidden: Iterable[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
    """Undo `hide_unused` after the update."""
    for parameter, gradient in hidden:
        parameter.grad = gradient


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
