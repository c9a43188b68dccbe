"""Put a state into a replica."""

from __future__ import annotations

from typing import Any

import torch

from dure.checkpoint.capture import optimized
from dure.checkpoint.plain import from_plain
from dure.checkpoint.state import COUNTER, MODEL, OPTIMIZER, Part, Schedule, Sharing, WholeState
from dure.errors import CheckpointError
from dure.exchange.handover import flat
from dure.fingerprint import named_weights


def restore(
    whole: WholeState,
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Schedule | None,
    sharing: Sharing | None = None,
) -> None:
    """Put a state into a replica, in place; nothing is written when it does not fit."""
    _refuse_misfit(whole, module, optimizer, schedule)
    for name, tensor in named_weights(module):
        # Through .data: where the ranks of a node share their weights, all write the same bytes here, and that is no
        # write from outside that the guard of the shared memory should refuse.
        tensor.data.copy_(whole.elements(MODEL + name).view(tensor.shape))
    _restore_optimizer(whole, module, optimizer, sharing)
    if schedule is not None:
        schedule.load_state_dict(from_plain(whole.facts["schedule"]))


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
    left = [p.name for p in whole.table.places if p.name.startswith(MODEL) and p.name not in known]
    if left:
        raise CheckpointError(
            f"it has {left[0].removeprefix(MODEL)}, which the model has not; it is of another model"
        )
    told = whole.facts["optimizer"]
    if told["kind"] != type(optimizer).__name__ or len(told["groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"its optimizer is {told['kind']} with {len(told['groups'])} group(s), the job's is "
            f"{type(optimizer).__name__} with {len(optimizer.param_groups)}"
        )
    if (schedule is None) != (whole.facts["schedule"] is None):
        raise CheckpointError("only one of it and the job has a schedule")


def _restore_optimizer(
    whole: WholeState, module: torch.nn.Module, optimizer: torch.optim.Optimizer, sharing: Sharing | None
) -> None:
    told = whole.facts["optimizer"]
    for group, settings in zip(optimizer.param_groups, told["groups"], strict=True):
        group.update(from_plain(settings))
    keys: dict[str, list[str]] = {}
    for place in whole.table.places:
        if place.name.startswith(OPTIMIZER):
            name, _, key = place.name.removeprefix(OPTIMIZER).rpartition("/")
            keys.setdefault(name, []).append(key)
    optimizer.state.clear()
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    for name, held, part in optimized(dict(named_weights(module)), optimizer, sharing):
        state = {key: from_plain(value) for key, value in told["values"].get(name, {}).items()}
        for key in keys.get(name, []):
            state[key] = _restored(whole, f"{OPTIMIZER}{name}/{key}", key, held, part, groups[held])
        if state:
            optimizer.state[held] = state


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
