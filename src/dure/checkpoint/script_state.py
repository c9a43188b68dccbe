"""What a script's state holds besides one model, one optimizer and one schedule.

Several of them are seen as one of each; `extra` holds tensors, plain values, and objects that have a `state_dict` (an
average of the weights, a metric, a replay buffer)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch.nn.parallel import DistributedDataParallel

from dure.base.errors import CheckpointError, UsageError
from dure.base.say import printable
from dure.checkpoint.state import EXTRA, WholeState, from_plain, to_plain

_NAME = re.compile(r"[A-Za-z0-9_]+")
_TENSOR = "(tensor)"


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


class Extra:
    """A script's own dict. What is in it when a state is taken is saved; a state that is restored is put back into it:
    objects load it, tensors are written in place, other values are replaced."""

    def __init__(self, values: dict[str, Any]) -> None:
        named(values, "extra")  # refuses names that cannot be
        self._values = values
        self.take()  # what cannot be saved is refused before anything is trained

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors, each under its name in the state."""
        return self.take()[0]

    def take(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The tensors by name, and all else as plain JSON, with the tensors' names in their places."""
        tensors: dict[str, torch.Tensor] = {}
        plain = {
            name: to_plain(_without_tensors(_state_of(value), f"{EXTRA}{name}", tensors), f"extra {name}")
            for name, value in self._values.items()
        }
        return tensors, plain

    def refuse_misfit(self, whole: WholeState) -> None:
        """Raise CheckpointError when a state has other things in it; nothing is changed."""
        told = whole.facts.get("extra", {})
        if not isinstance(told, Mapping):
            raise CheckpointError("its extra values cannot be read")
        for name in self._values:
            if name not in told:
                raise CheckpointError(f"it has no {name} in extra, which the script has")
        for name, value in self._values.items():
            found = self._found(whole, name)
            if isinstance(value, torch.Tensor) and not (
                isinstance(found, torch.Tensor) and (found.dtype, found.shape) == (value.dtype, value.shape)
            ):
                raise CheckpointError(f"its extra {name} is not a tensor like the script's")

    def put_back(self, whole: WholeState) -> None:
        """Take over what a state has, also what the script added while it ran."""
        for name in whole.facts.get("extra", {}):
            found, value = self._found(whole, name), self._values.get(name)
            if isinstance(value, torch.Tensor):
                with torch.no_grad():
                    value.copy_(found)
            elif value is not None and _has_state(value):
                value.load_state_dict(found)
            else:
                self._values[name] = found

    def _found(self, whole: WholeState, name: str) -> Any:
        try:
            return _with_tensors(from_plain(whole.facts["extra"][name]), whole)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"its extra {name} cannot be read ({printable(str(error), 80)})") from None


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _state_of(value: Any) -> Any:
    return value.state_dict() if _has_state(value) else value


def _without_tensors(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """The same with the names of tensors in their places; a state_dict's OrderedDict is a dict."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise CheckpointError(f"{path} is a tensor of layout {value.layout}; a checkpoint has dense ones")
        tensors[path] = value.detach()
        return {_TENSOR: path}
    if isinstance(value, dict):
        if _TENSOR in value:
            raise CheckpointError(f"{path} has a key {_TENSOR!r}, which checkpoints use themselves")
        inner = {key: _without_tensors(one, f"{path}/{key}", tensors) for key, one in value.items()}
        return type(value)(inner) if type(value).__name__ == "Counter" else inner
    if type(value) in (list, tuple):
        return type(value)(_without_tensors(one, f"{path}/{at}", tensors) for at, one in enumerate(value))
    return value


def _with_tensors(value: Any, whole: WholeState) -> Any:
    if isinstance(value, dict):
        if set(value) == {_TENSOR}:
            span = whole.table.by_name[value[_TENSOR]]
            return whole.elements(span.name).clone().view(span.shape)
        return type(value)(dict(_pairs(value, whole)))
    if isinstance(value, list | tuple):
        return type(value)(_with_tensors(one, whole) for one in value)
    return value


def _pairs(value: Mapping[Any, Any], whole: WholeState) -> Iterator[tuple[Any, Any]]:
    for key, one in value.items():
        yield key, _with_tensors(one, whole)
