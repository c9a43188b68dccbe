"""Take the state from a replica. A step waits for this: what is the same each time is found out once."""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dure.base.errors import CheckpointError
from dure.checkpoint.script_state import Extra, kind_of
from dure.checkpoint.state import (
    COUNTER,
    FORMAT,
    MODEL,
    OPTIMIZER,
    LiveHash,
    Part,
    Piece,
    Schedule,
    Share,
    Sharing,
    State,
    Table,
    TensorSpan,
    cut,
    dtype_named,
    to_plain,
)
from dure.comm.group import Group
from dure.comm.param_sync import flat

_UNCHANGING = (torch.Tensor, int, float, str, type(None))
"""Of a tensor, only the values change."""


class Capture:
    """Captures the states of one replica, one after the other."""

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule | None,
        extra: Extra | None = None,
    ) -> None:
        self._module = module
        self._optimizer = optimizer
        self._schedule = schedule
        self._extra = extra
        self._stock: _Stock | None = None
        self._modules: list[torch.nn.Module] = []
        self._seen: _Seen | None = None

    def take(self, facts: Mapping[str, Any], share: Share, sharing: Sharing | None = None) -> State:
        """This rank's share of the state. `facts` are the caller's own, plain JSON; among them "step", the next one.

        With `sharing` it is a collective call of those ranks.
        """
        own, values = self._extra.take() if self._extra is not None else ({}, {})
        stock, optimizer, schedule = self._stock_now(sharing, own), self._optimizer, self._schedule
        alike = tuple(_alike(stock, share, sharing))
        return State(
            {
                "format": FORMAT,
                "model": {"ties": stock.ties, "not_persistent": stock.not_persistent},
                "optimizer": {
                    "kind": kind_of(optimizer),
                    "groups": [
                        to_plain(_settings(group), "the optimizer's group")
                        for group in optimizer.param_groups
                    ],
                    "values": stock.values,
                },
                "schedule": None if schedule is None else to_plain(schedule.state_dict(), "the schedule"),
                **({"extra": values} if self._extra is not None else {}),
                **facts,
            },
            stock.table,
            (*alike, *_parts_of_rank(stock, sharing)),
            alike,
            _neighbour_hash(stock, share, sharing) if share.parts > 1 else None,
        )

    def _stock_now(self, sharing: Sharing | None, extra: Mapping[str, torch.Tensor]) -> _Stock:
        """The last one, as long as the very same tensors are in the same places."""
        if sharing is not None or extra:
            # Ranks list a sharded optimizer together, so that none may leave it out. A state_dict makes new tensors.
            return _take_stock(self._module, self._optimizer, sharing, extra)
        seen = self._look()
        if self._stock is None or self._seen is None or not seen.same(self._seen):
            self._stock = _take_stock(self._module, self._optimizer, None, extra)
            self._modules = list(self._module.modules())
            self._seen = self._look()
        return self._stock

    def _look(self) -> _Seen:
        inside = itertools.chain.from_iterable(
            (*module._parameters.items(), *module._buffers.items(), *module._modules.items())
            for module in self._modules
        )
        found: list[Any] = list(itertools.chain.from_iterable(inside))
        state = self._optimizer.state
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                found.append(parameter)
                for value in state[parameter].values() if parameter in state else ():
                    # A list, say, can change and still be the same: then nothing is.
                    found.append(value if isinstance(value, _UNCHANGING) else object())
        return _Seen(
            found, [(thing.dtype, thing.shape) for thing in found if isinstance(thing, torch.Tensor)]
        )


@dataclass(frozen=True)
class _Seen:
    """The model's names, tensors and modules, and the optimizer's tensors and other values."""

    things: list[Any]
    shapes: list[tuple[torch.dtype, torch.Size]]
    """Of those that are tensors: they can get others in place."""

    def same(self, other: _Seen) -> bool:
        """Whether these are the very same objects."""
        return (
            len(self.things) == len(other.things)
            and all(map(operator.is_, self.things, other.things))
            and self.shapes == other.shapes
        )


class _Held(NamedTuple):
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


@dataclass(frozen=True)
class _Stock:
    """What a replica has: its tensors by name, and where each of them is in a state."""

    weights: dict[str, torch.Tensor]
    own: dict[str, _Held]
    """This rank's tensors of the optimizer's state."""
    values: dict[str, dict[str, Any]]
    """What in the optimizer's state is no tensor, by parameter."""
    ties: dict[str, str]
    not_persistent: list[str]
    """Buffers that the model's own state_dict leaves out."""
    buffers: frozenset[str]
    """What may change between two updates: the model's buffers, and a script's own tensors."""
    table: Table
    cuts: dict[Share, list[tuple[TensorSpan, int, int]]]
    """Of what all ranks hold, what each share is; as far as it was asked for."""


def _take_stock(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    sharing: Sharing | None,
    extra: Mapping[str, torch.Tensor],
) -> _Stock:
    named, ties = _weights_and_ties(module)
    weights = {**{MODEL + name: tensor for name, tensor in named.items()}, **extra}
    own, values = _optimizer_state(named, optimizer, sharing)
    specs = {name: (held.value.dtype, held.shape) for name, held in own.items()}
    if sharing is not None:
        specs, values = _everyones(specs, values, sharing.ranks)
    shapes = ((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items())
    table = Table.of([*shapes, *((name, *specs[name]) for name in sorted(specs))])
    buffers = frozenset([*(MODEL + name for name, _ in module.named_buffers()), *extra])
    return _Stock(weights, own, values, ties, sorted(not_persistent(module)), buffers, table, {})


def _weights_and_ties(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """What `named_weights` gives, and further names of the same tensors: name → the name it is under."""
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


def _optimizer_state(
    named: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, sharing: Sharing | None
) -> tuple[dict[str, _Held], dict[str, dict[str, Any]]]:
    """This rank's tensors of the optimizer's state by name, and what in it is no tensor, by parameter."""
    tensors: dict[str, _Held] = {}
    values: dict[str, dict[str, Any]] = {}
    for name, held, part in optimized(named, optimizer, sharing):
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


def optimized(
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


def _alike(stock: _Stock, share: Share, sharing: Sharing | None) -> Iterator[Piece]:
    """What all ranks hold is cut into equal shares."""
    own = stock.own
    if share not in stock.cuts:
        spans = stock.table.spans
        alike = [span for span in spans if sharing is None or not span.name.startswith(OPTIMIZER)]
        stock.cuts[share] = list(cut(alike, share.part, share.parts))
    for span, start, stop in stock.cuts[share]:
        held = own.get(span.name)
        values = _flat(stock.weights[span.name]) if held is None else held.flat()
        yield Piece(span, start, stop, values[start:stop])


def _neighbour_hash(stock: _Stock, share: Share, sharing: Sharing | None) -> LiveHash:
    """The hash of the next rank's share, in this replica; of buffers, which a forward pass may write, a copy."""
    watched = Share((share.part + 1) % share.parts, share.parts)
    return LiveHash(
        (piece.offset, piece.values.clone() if piece.span.name in stock.buffers else piece.values)
        for piece in _alike(stock, watched, sharing)
    )


def _parts_of_rank(stock: _Stock, sharing: Sharing | None) -> Iterator[Piece]:
    """Of a sharded optimizer, each rank gives what it has."""
    if sharing is None:
        return
    for name, held in sorted(stock.own.items()):
        length = held.value.numel()
        first, end = (length * at // sharing.nodes for at in (sharing.node, sharing.node + 1))
        if first < end:
            span = stock.table.by_name[name]
            yield Piece(span, held.start + first, held.start + end, held.flat()[first:end])


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def not_persistent(module: torch.nn.Module) -> Iterable[str]:
    """Buffers that the model's own state_dict leaves out."""
    for path, inner in module.named_modules():
        yield from (f"{path}.{name}" if path else name for name in inner._non_persistent_buffers_set)
