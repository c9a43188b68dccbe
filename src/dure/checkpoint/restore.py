"""Put a state into a replica."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dure.base.errors import CheckpointError
from dure.base.say import printable
from dure.checkpoint.capture import optimized
from dure.checkpoint.script_state import Extra, kind_of
from dure.checkpoint.state import COUNTER, MODEL, OPTIMIZER, Part, Schedule, Sharing, WholeState, from_plain
from dure.comm.param_sync import flat
from dure.device.fingerprint import named_weights


def restore(
    whole: WholeState,
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Schedule | None,
    sharing: Sharing | None = None,
    extra: Extra | None = None,
) -> None:
    """Put a state into a replica, in place; CheckpointError, and nothing is written, when it does not fit."""
    _refuse_misfit(whole, module, optimizer, schedule)
    if extra is not None:
        extra.refuse_misfit(whole)
    settings = [_settings(told, group) for told, group in _groups(whole, optimizer)]
    scheduled = None if schedule is None else _checked(whole.facts["schedule"], schedule.state_dict())
    for name, tensor in named_weights(module):
        # Through .data: where the ranks of a node share their weights, all write the same bytes here, and that is no
        # write from outside that the guard of the shared memory should refuse.
        tensor.data.copy_(whole.elements(MODEL + name).view(tensor.shape))
    for group, told in zip(optimizer.param_groups, settings, strict=True):
        group.update(told)
    _restore_optimizer(whole, module, optimizer, sharing)
    if schedule is not None:
        schedule.load_state_dict({**schedule.state_dict(), **(scheduled or {})})
    if extra is not None:
        extra.put_back(whole)


def _refuse_misfit(
    whole: WholeState, module: torch.nn.Module, optimizer: torch.optim.Optimizer, schedule: Schedule | None
) -> None:
    for name, tensor in named_weights(module):
        place = whole.table.by_name.get(MODEL + name)
        if place is None:
            raise CheckpointError(f"it has no {name}, which the model has; it is of another model")
        if place.shape != tuple(tensor.shape) or place.dtype != tensor.dtype:
            raise CheckpointError(
                f"its {name} is {place.dtype} {list(place.shape)}, the model's is {tensor.dtype} "
                f"{list(tensor.shape)}; it is of another model"
            )
    known = {MODEL + name for name, _ in named_weights(module)}
    left = [p.name for p in whole.table.spans if p.name.startswith(MODEL) and p.name not in known]
    if left:
        raise CheckpointError(
            f"it has {printable(left[0].removeprefix(MODEL), 80)}, which the model has not; it is of another model"
        )
    told = whole.facts["optimizer"]
    if told["kind"] != kind_of(optimizer) or len(told["groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"its optimizer is {printable(told['kind'], 80)} with {len(told['groups'])} group(s), the job's is "
            f"{kind_of(optimizer)} with {len(optimizer.param_groups)}"
        )
    if (schedule is None) != (whole.facts["schedule"] is None):
        raise CheckpointError("only one of it and the job has a schedule")


def _restore_optimizer(
    whole: WholeState, module: torch.nn.Module, optimizer: torch.optim.Optimizer, sharing: Sharing | None
) -> None:
    told = whole.facts["optimizer"]
    keys: dict[str, list[str]] = {}
    for place in whole.table.spans:
        if place.name.startswith(OPTIMIZER):
            name, _, key = place.name.removeprefix(OPTIMIZER).rpartition("/")
            keys.setdefault(name, []).append(key)
    optimizer.state.clear()
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    for name, held, part in optimized(dict(named_weights(module)), optimizer, sharing):
        state = {key: _plain(value) for key, value in told["values"].get(name, {}).items()}
        for key in keys.get(name, []):
            state[key] = _restored(whole, f"{OPTIMIZER}{name}/{key}", key, held, part, groups[held])
        if state:
            optimizer.state[held] = state


def _groups(
    whole: WholeState, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    return zip(whole.facts["optimizer"]["groups"], optimizer.param_groups, strict=True)


def _settings(told: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    return _checked(told, {key: value for key, value in group.items() if key != "params"})


def _checked(told: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What a state says of settings that there are, each of the kind that it has now: a schedule takes whatever it is
    given for its own attributes and methods."""
    found = _plain(told)
    if not isinstance(found, dict):
        raise CheckpointError("its settings cannot be read")
    for key, value in found.items():
        if key not in now:
            raise CheckpointError(f"it has a setting {printable(str(key), 80)}, which the job's has not")
        if not _alike(value, now[key]):
            raise CheckpointError(
                f"its setting {printable(str(key), 80)} is {printable(repr(value), 80)}, the job's is "
                f"{printable(repr(now[key]), 80)}"
            )
    return found


def _alike(value: Any, now: Any) -> bool:
    """Whether both are of one kind; what is None at one time may be something else at another."""
    if value is None or now is None:
        return True
    if isinstance(now, int | float) and not isinstance(now, bool):
        return isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(now, list | tuple):
        same = type(value) is type(now) and len(value) == len(now)
        return same and all(map(_alike, value, now))
    return type(value) is type(now)


def _plain(told: Any) -> Any:
    try:
        return from_plain(told)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"its settings cannot be read ({printable(str(error), 80)})") from None


def _restored(
    whole: WholeState, name: str, key: str, held: torch.Tensor, part: Part, group: dict[str, Any]
) -> torch.Tensor:
    """A tensor of the optimizer's state, laid out and placed as the optimizer makes it itself."""
    place = whole.table.by_name[name]
    like_parameter = place.shape in (tuple(part.parameter.shape), (part.parameter.numel(),))
    if key == COUNTER or not like_parameter:
        value = whole.elements(name).clone().view(place.shape)
        # As torch's own loading has it: counters stay on the CPU unless a kernel reads them.
        on_device = key != COUNTER or group.get("capturable") or group.get("fused")
        return value.to(held.device) if on_device else value
    values = whole.elements(name, part.start, part.stop)
    made = torch.empty_like(held, dtype=place.dtype, requires_grad=False)
    if torch.ops.aten.is_non_overlapping_and_dense(held):
        flat(made).copy_(values)
    else:
        made.copy_(values.view(held.shape))
    return made
