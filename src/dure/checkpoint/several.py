"""Several models, optimizers and schedules of one run as one of each, so that one state holds them all."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch.nn.parallel import DistributedDataParallel

from dure.base.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9_]+")


class Stateful(Protocol):
    """Whatever gives its state and takes it back."""

    def state_dict(self) -> Any:
        """The state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take over what `state_dict` gave."""


def named(given: Any, what: str) -> dict[str, Any] | None:
    """Those of a dict or a list by name; None for a single one, which has no name."""
    if isinstance(given, Mapping):
        found = dict(given)
    elif isinstance(given, Sequence) and not isinstance(given, torch.nn.Module):
        found = {str(at): one for at, one in enumerate(given)}
    else:
        return None
    for name in found:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UsageError(f"{what} has the name {name!r}; use letters, digits and _")
    return found


def one_module(given: Any) -> torch.nn.Module:
    """The model, or one whose parts are all of them, each under its name. DDP's wrapping is taken off."""
    models = named(given, "model")
    if models is None:
        return _bare(given)
    whole = torch.nn.Module()
    for name, model in models.items():
        try:
            whole.add_module(name, _bare(model))
        except KeyError:
            raise UsageError(
                f"model has the name {name!r}, which torch uses itself; choose another"
            ) from None
    return whole


def one_optimizer(given: Any) -> torch.optim.Optimizer:
    """The optimizer, or one view of all of them."""
    optimizers = named(given, "optimizer")
    if optimizers is None:
        optimizers = {} if given is None else {"": given}
    for optimizer in optimizers.values():
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"optimizer is a {type(optimizer).__name__}; give one of torch.optim, or a dict or list of them"
            )
    if len(optimizers) == 1:
        return cast(torch.optim.Optimizer, next(iter(optimizers.values())))
    # Capture, restore and proof only look at `param_groups` and `state`; nobody steps it.
    return cast(torch.optim.Optimizer, Optimizers(list(optimizers.values())))


def one_schedule(given: Any) -> Any:
    """The schedule, or one view of all of them; None without one."""
    schedules = named(given, "schedule")
    if schedules is None:
        schedules = {} if given is None else {"": given}
    for schedule in schedules.values():
        if not (hasattr(schedule, "state_dict") and hasattr(schedule, "load_state_dict")):
            raise UsageError(
                f"schedule is a {type(schedule).__name__} without state_dict and load_state_dict, so that it could not "
                "go on; add them, or leave it out if its value is a function of the step"
            )
    if len(schedules) < 2:
        return next(iter(schedules.values()), None)
    return Schedules(schedules)


def optimizers_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Those that `one_optimizer` was given."""
    return optimizer.all if isinstance(optimizer, Optimizers) else [optimizer]


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """The name of its class; of several, all of them."""
    return "+".join(type(each).__name__ for each in optimizers_of(optimizer))


def _bare(model: Any) -> torch.nn.Module:
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"model is a {type(model).__name__}; give what team.replicate returned, or a dict or list of such"
        )
    found = model.module if isinstance(model, DistributedDataParallel) else model
    assert isinstance(found, torch.nn.Module)
    return found


class Optimizers:
    """Several optimizers, seen as one with all their groups and all their state."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.all = optimizers
        self.state = _States(optimizers)
        seen: set[int] = set()
        for group in self.param_groups:
            for parameter in group["params"]:
                if id(parameter) in seen:
                    raise UsageError(
                        f"two optimizers have the same parameter, of shape {tuple(parameter.shape)}; a checkpoint "
                        "could not tell their state apart"
                    )
                seen.add(id(parameter))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of all of them, in order."""
        return [group for optimizer in self.all for group in optimizer.param_groups]


class _States:
    """The state of several optimizers, by parameter: what capture, restore and proof ask of it."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return any(parameter in optimizer.state for optimizer in self._optimizers)

    def __getitem__(self, parameter: torch.Tensor) -> Any:
        return next(each.state[parameter] for each in self._optimizers if parameter in each.state)

    def __setitem__(self, parameter: torch.Tensor, state: Any) -> None:
        next(each for each in self._optimizers if _updates(each, parameter)).state[parameter] = state

    def get(self, parameter: torch.Tensor, default: Any) -> Any:
        """What there is of a parameter."""
        return next((each.state[parameter] for each in self._optimizers if parameter in each.state), default)

    def clear(self) -> None:
        """Forget it all."""
        for optimizer in self._optimizers:
            optimizer.state.clear()


def _updates(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    return any(parameter is held for group in optimizer.param_groups for held in group["params"])


class Schedules:
    """Several schedules, seen as one whose settings have their names before them."""

    def __init__(self, schedules: Mapping[str, Stateful]) -> None:
        self._schedules = schedules

    def state_dict(self) -> dict[str, Any]:
        """Flat: each setting is then compared with its own kind before it is taken over."""
        return dict(self._flat())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        for name, schedule in self._schedules.items():
            own = f"{name}."
            schedule.load_state_dict(
                {key.removeprefix(own): value for key, value in state.items() if key.startswith(own)}
            )

    def _flat(self) -> Iterator[tuple[str, Any]]:
        for name, schedule in self._schedules.items():
            for key, value in schedule.state_dict().items():
                yield f"{name}.{key}", value
