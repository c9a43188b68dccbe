"""What a script adds to the state besides models, optimizers and schedules: tensors, plain values, and objects that
have a `state_dict` (an average of the weights, a metric, a replay buffer)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dure.base.errors import CheckpointError
from dure.base.say import printable
from dure.checkpoint.several import named
from dure.checkpoint.state import EXTRA, WholeState, from_plain, to_plain

_TENSOR = "(tensor)"


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
