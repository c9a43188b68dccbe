"""The state: all that the next step depends on, as named tensors and plain facts. Captured from a replica,
restored into one.

Random numbers, the order of samples and the schedule's value are functions of the seed and the step, so they need no
state: parameters, buffers, the optimizer's state and the cursor are all there is. Nothing here depends on how many
ranks there are: each rank captures a share of the tensors' bytes, and all shares together are the same whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dure.checkpoint.plain import from_plain, to_plain
from dure.checkpoint.table import Place, Table, cut, dtype_named
from dure.errors import CheckpointError
from dure.exchange.copying import copy_into
from dure.exchange.group import Group
from dure.exchange.handover import flat
from dure.fingerprint import named_weights

FORMAT = 1
"""Of facts and files; a newer one is refused by name."""
MODEL, OPTIMIZER = "model/", "optimizer/"
"""What the names of weights, and of the optimizer's tensors, begin with."""

COUNTER = "step"
"""What torch's optimizers call the number of their steps, which is no element of a parameter of one element."""

Schedule = torch.optim.lr_scheduler.LRScheduler


@dataclass(frozen=True)
class Part:
    """What an optimizer that ranks hold in parts has of one parameter: its elements in the order of memory."""

    parameter: torch.nn.Parameter
    start: int
    stop: int


@dataclass(frozen=True)
class Sharing:
    """Who holds a sharded optimizer: the parts of this rank, and the ranks that have all of it together."""

    parts: Mapping[torch.Tensor, Part]
    """By the tensor that stands in the optimizer's groups."""
    ranks: Group
    node: int = 0
    nodes: int = 1
    """Every node holds all of it, so that each captures only its share of its parts."""


@dataclass(frozen=True)
class Share:
    """Which share of the state a rank captures."""

    part: int
    parts: int


@dataclass(frozen=True)
class Piece:
    """A run of a tensor's elements."""

    place: Place
    start: int
    stop: int
    values: torch.Tensor
    """The live tensor's own memory where it can be: copy it before the next step."""

    @property
    def nbytes(self) -> int:
        """Of this run."""
        return (self.stop - self.start) * self.place.dtype.itemsize

    @property
    def offset(self) -> int:
        """Where it begins in the whole state's memory, in bytes."""
        return self.place.start + self.start * self.place.dtype.itemsize


@dataclass(frozen=True)
class State:
    """A rank's share of the state before step `facts["step"]`, of which the facts and the table are everyone's."""

    facts: dict[str, Any]
    table: Table
    pieces: tuple[Piece, ...]

    def copy_into(self, whole: torch.Tensor) -> None:
        """Copy this rank's share to its place in a memory (uint8) of `table.nbytes` bytes."""
        copy_into(whole, [piece.offset for piece in self.pieces], [piece.values for piece in self.pieces])


@dataclass(frozen=True)
class WholeState:
    """A state with all its bytes in one memory."""

    facts: dict[str, Any]
    table: Table
    memory: torch.Tensor

    def elements(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """A run of a tensor's elements, flat; a view."""
        place = self.table.by_name[name]
        size = place.dtype.itemsize
        end = place.numel if stop is None else stop
        return typed(self.memory, place.dtype, place.start + start * size, (end - start) * size)


def typed(memory: torch.Tensor, dtype: torch.dtype, start: int, nbytes: int) -> torch.Tensor:
    """Bytes of a memory as elements of a type."""
    return memory[start : start + nbytes].view(dtype)


def capture(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Schedule | None,
    facts: Mapping[str, Any],
    share: Share,
    sharing: Sharing | None = None,
) -> State:
    """This rank's share of the state. `facts` are the caller's own, plain JSON; among them "step", the next one.

    With `sharing` it is a collective call of those ranks.
    """
    named, ties = _weights_and_ties(module)
    weights = {MODEL + name: tensor for name, tensor in named.items()}
    own, values = _optimizer_state(named, optimizer, sharing)
    specs = {name: (held.value.dtype, held.shape) for name, held in own.items()}
    if sharing is not None:
        specs, values = _everyones(specs, values, sharing.ranks)
    shapes = ((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items())
    table = Table.of([*shapes, *((name, *specs[name]) for name in sorted(specs))])
    return State(
        {
            "format": FORMAT,
            "model": {"ties": ties, "not_persistent": sorted(_not_persistent(module))},
            "optimizer": {
                "kind": type(optimizer).__name__,
                "groups": [
                    to_plain(_settings(group), "the optimizer's group") for group in optimizer.param_groups
                ],
                "values": values,
            },
            "schedule": None if schedule is None else to_plain(schedule.state_dict(), "the schedule"),
            **facts,
        },
        table,
        tuple(_pieces(table, weights, own, share, sharing)),
    )


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


def _weights_and_ties(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """What `named_weights` gives, and further names of the same tensors: name → the name it is under.

    In one walk through the model: a step waits for this.
    """
    first: dict[int, str] = {}
    weights, ties = {}, {}
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        known = first.setdefault(id(tensor), name)
        if known == name:
            weights[name] = tensor
        else:
            ties[name] = known
    return dict(sorted(weights.items())), ties


class _Held(
    NamedTuple
):  # made by the hundred while a step waits: a frozen dataclass takes three times as long
    """A tensor of the optimizer's state: what this rank has of it, and the shape of all of it."""

    value: torch.Tensor
    shape: tuple[int, ...]
    start: int = 0
    like: torch.Tensor | None = None
    """What it has an element for each element of, if so."""

    def flat(self) -> torch.Tensor:
        """In the order that the parameter has in memory: that is how a sharded optimizer cuts it."""
        value, like = self.value.detach(), self.like
        if like is not None and like.is_contiguous() and value.is_contiguous():
            return value.view(-1)
        if like is None or not torch.ops.aten.is_non_overlapping_and_dense(like):
            return value.contiguous().view(-1)
        if value.stride() != like.stride():
            value = torch.empty_like(like, dtype=value.dtype).copy_(value)
        return flat(value)


def _optimizer_state(
    named: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, sharing: Sharing | None
) -> tuple[dict[str, _Held], dict[str, dict[str, Any]]]:
    """This rank's tensors of the optimizer's state by name, and what in it is no tensor, by parameter."""
    tensors: dict[str, _Held] = {}
    values: dict[str, dict[str, Any]] = {}
    for name, held, part in _optimized(named, optimizer, sharing):
        for key, value in sorted(optimizer.state.get(held, {}).items()):
            if not isinstance(value, torch.Tensor):
                values.setdefault(name, {})[key] = to_plain(value, f"the optimizer's {key} of {name}")
            elif value.shape == held.shape and key != COUNTER:
                whole = part.parameter
                shape = tuple(whole.shape) if whole.is_contiguous() else (whole.numel(),)
                tensors[f"{OPTIMIZER}{name}/{key}"] = _Held(value, shape, part.start, held)
            elif part.start == 0:  # a counter: every part has it, the first part's counts
                tensors[f"{OPTIMIZER}{name}/{key}"] = _Held(value, tuple(value.shape))
    return tensors, values


def _optimized(
    named: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, sharing: Sharing | None
) -> Iterator[tuple[str, torch.Tensor, Part]]:
    """Name, tensor in the optimizer, and which part of the parameter it is, of all that this rank updates."""
    names = {id(parameter): name for name, parameter in named.items()}
    parts = {} if sharing is None else sharing.parts
    for group in optimizer.param_groups:
        for held in group["params"]:
            part = parts.get(held) or Part(held, 0, held.numel())
            if id(part.parameter) not in names:
                raise CheckpointError(
                    f"the optimizer has a parameter of shape {tuple(part.parameter.shape)} that is not the model's"
                )
            yield names[id(part.parameter)], held, part


def _everyones(
    specs: dict[str, tuple[torch.dtype, tuple[int, ...]]], values: dict[str, Any], ranks: Group
) -> tuple[dict[str, tuple[torch.dtype, tuple[int, ...]]], dict[str, Any]]:
    """What all ranks hold together."""
    told = {name: [str(dtype).removeprefix("torch."), list(shape)] for name, (dtype, shape) in specs.items()}
    for text in ranks.gather(json.dumps([told, values]), "listing the optimizer's state"):
        theirs, their_values = json.loads(text)
        specs = {**{n: (dtype_named(d), tuple(shape)) for n, (d, shape) in theirs.items()}, **specs}
        values = {**their_values, **values}
    return specs, dict(sorted(values.items()))


def _pieces(
    table: Table,
    weights: Mapping[str, torch.Tensor],
    own: Mapping[str, _Held],
    share: Share,
    sharing: Sharing | None,
) -> Iterator[Piece]:
    """What all ranks hold is cut into equal shares; of a sharded optimizer, each rank gives what it has."""
    alike = [place for place in table.places if sharing is None or not place.name.startswith(OPTIMIZER)]
    for place, start, stop in cut(alike, share.part, share.parts):
        held = own.get(place.name)
        values = _flat(weights[place.name]) if held is None else held.flat()
        yield Piece(place, start, stop, values[start:stop])
    if sharing is None:
        return
    for name, held in sorted(own.items()):
        length = held.value.numel()
        first, end = (length * at // sharing.nodes for at in (sharing.node, sharing.node + 1))
        if first < end:
            place = table.by_name[name]
            yield Piece(place, held.start + first, held.start + end, held.flat()[first:end])


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _not_persistent(module: torch.nn.Module) -> Iterable[str]:
    """Buffers that the model's own state_dict leaves out."""
    for path, inner in module.named_modules():
        yield from (f"{path}.{name}" if path else name for name in inner._non_persistent_buffers_set)


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
    for name, held, part in _optimized(dict(named_weights(module)), optimizer, sharing):
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
