"""The sharded optimizer: each rank of a node updates its part of the parameters and hands it to the others.

Replicas that run the whole optimizer all do the same work. Here each rank's optimizer holds only the part
of the parameters that is its own, and state for that part alone. The optimizer itself stays torch's: its
groups, schedules and fused kernels go on as before, and two hooks around `step` do the rest.

Why the bits are the same: what an elementwise optimizer does to a weight depends on that weight, its
gradient and its state. But kernels take the last few elements of a tensor with other instructions than the
rest, and those may round differently (fused AdamW and SGD do). So a parameter is cut at whole lines from
its start: every element stays where it was, in the body or among the last few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dure.base.errors import ModelRefused, UsageError
from dure.comm.group import Group
from dure.comm.param_sync import (
    LINE_BYTES,
    Copied,
    Fragment,
    NodeMemory,
    OneMemory,
    ParamSync,
    boxes_bytes,
    flat,
    whole_bytes,
)
from dure.comm.shm_segment import share_or_none
from dure.device.accelerator import is_host

SMALL_BYTES = 16 * 1024
"""A smaller parameter is not cut: it belongs to the rank that has the least so far."""

_ELEMENTWISE = frozenset(
    {
        *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam),
        *(torch.optim.Adamax, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop),
        *(torch.optim.ASGD, torch.optim.Rprop),
    }
)
_REASONS = {
    "Adafactor": "it keeps sums over whole rows and columns",
    "LBFGS": "it needs all gradients at once",
    "Muon": "it makes whole matrices orthogonal",
    "SparseAdam": "it needs sparse gradients",
}


def cut(parameters: Sequence[tuple[int, int]], ranks: int) -> list[list[Fragment]]:
    """Each rank's fragments of parameters that are given as (number of elements, bytes of one).

    Every element has one owner, and ranks own about the same number of bytes.
    """
    owned: list[list[Fragment]] = [[] for _ in range(ranks)]
    held = [0] * ranks
    for at, (numel, itemsize) in enumerate(parameters):
        if numel * itemsize < SMALL_BYTES:
            bounds = {held.index(min(held)): (0, numel)}
        else:
            line = LINE_BYTES // itemsize
            lines = -(-numel // line)
            edges = [min(rank * lines // ranks * line, numel) for rank in range(ranks + 1)]
            bounds = {rank: (edges[rank], edges[rank + 1]) for rank in range(ranks)}
        for rank, (start, stop) in bounds.items():
            if start < stop:
                owned[rank].append(Fragment(at, start, stop))
                held[rank] += (stop - start) * itemsize
    return owned


def refuse_what_cannot_be_sharded(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str], threads: int
) -> None:
    """Say which optimizer, or which of its parameters, cannot be updated in parts."""
    kind = type(optimizer)
    if kind not in _ELEMENTWISE:
        why = _REASONS.get(kind.__name__, "it is not known to update every element by itself")
        possible = ", ".join(sorted(known.__name__ for known in _ELEMENTWISE))
        raise ModelRefused(
            f"{kind.__name__} cannot be sharded: {why}; use one of {possible}, or do not shard it"
        )
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise ModelRefused("an optimizer with differentiable=True cannot be sharded; do not shard it")
        for parameter in group["params"]:
            if parameter not in names:
                raise UsageError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the model's; "
                    "shard an optimizer of this model's parameters alone"
                )
            _refuse_parameter(names[parameter], parameter, threads)


def _refuse_parameter(name: str, parameter: torch.Tensor, threads: int) -> None:
    if not torch.ops.aten.is_non_overlapping_and_dense(parameter):
        raise ModelRefused(
            f"{name} has gaps or overlaps in memory (strides {parameter.stride()}), so it cannot be updated in "
            "parts; make it contiguous, or do not shard the optimizer"
        )
    if parameter.is_complex():
        raise ModelRefused(f"{name} is complex; an optimizer of complex weights cannot be sharded")
    if threads > 1 and parameter.dtype in (torch.bfloat16, torch.float16):
        raise ModelRefused(
            f"{name} is {parameter.dtype}, and {threads} threads per rank cut its update at places that depend on its "
            "length; use one thread per rank, or do not shard the optimizer"
        )


class ShardedUpdate:
    """Makes an optimizer update this rank's part only, and everyone hold all parts after its `step`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rank: int,
        ranks: int,
        make_param_sync: Callable[[list[torch.nn.Parameter], list[list[Fragment]]], ParamSync],
        on_waiting: Callable[[bool], None] = lambda waiting: None,
    ) -> None:
        """`make_param_sync` is given the parameters and each rank's fragments of them, and may move the parameters;
        `on_waiting` is told when waiting begins and ends.

        The optimizer is changed in place: its groups hold this rank's part, and state it has is cut too.
        """
        self._on_waiting = on_waiting
        self._parameters = list(_trained(optimizer))
        self._owned = cut([(p.numel(), p.element_size()) for p in self._parameters], ranks)
        self._handover = make_param_sync(self._parameters, self._owned)
        self._places = [parameter.data_ptr() for parameter in self._parameters]
        self._rank = rank
        self._own = {id(self._parameters[fragment.parameter]): fragment for fragment in self._owned[rank]}
        """This rank's fragment of each parameter that it owns a part of."""
        self._parts: list[tuple[torch.nn.Parameter, torch.nn.Parameter, Fragment]] = []
        """This rank's part of a parameter, that parameter, and which part it is; not those it owns whole."""
        self._take_part(optimizer)
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def own_places(self, parameters: Sequence[torch.Tensor], offsets: Sequence[int]) -> list[range]:
        """Where this rank's part is in a bucket that holds these parameters' gradients, each from its offset.

        DDP lays a gradient out like its parameter, if that is dense; and those that are not were refused.
        """
        own = self._own
        return [
            range(offset + own[id(parameter)].start, offset + own[id(parameter)].stop)
            for parameter, offset in zip(parameters, offsets, strict=True)
            if id(parameter) in own
        ]

    @property
    def parts(self) -> dict[torch.Tensor, tuple[torch.nn.Parameter, Fragment]]:
        """What stands in this rank's optimizer for a part of a parameter; not what it has whole."""
        return {part: (parameter, fragment) for part, parameter, fragment in self._parts}

    def close(self) -> None:
        """Let go of what is shared with the others."""
        self._handover.close()

    def _take_part(self, optimizer: torch.optim.Optimizer) -> None:
        own = {fragment.parameter: fragment for fragment in self._owned[self._rank]}
        position = {parameter: at for at, parameter in enumerate(self._parameters)}
        for group in optimizer.param_groups:
            kept = []
            for parameter in group["params"]:
                if parameter not in position:  # frozen: nobody updates it, and one rank keeps its state
                    if self._rank == 0:
                        kept.append(parameter)
                    else:
                        optimizer.state.pop(parameter, None)
                    continue
                fragment = own.get(position[parameter])
                state = optimizer.state.pop(parameter, None)
                if fragment is None:
                    continue
                part = self._part(parameter, fragment)
                if state:
                    optimizer.state[part] = {
                        key: _part_of_state(value, parameter, fragment) for key, value in state.items()
                    }
                kept.append(part)
            group["params"] = kept

    def _part(self, parameter: torch.nn.Parameter, fragment: Fragment) -> torch.nn.Parameter:
        if fragment.stop - fragment.start == parameter.numel():
            return parameter
        part = torch.nn.Parameter(flat(parameter)[fragment.start : fragment.stop])
        self._parts.append((part, parameter, fragment))
        return part

    def _before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if len(args) > 1 or kwargs.get("closure") is not None:  # the first is the optimizer itself
            raise UsageError(
                "a sharded optimizer takes no closure; compute gradients with team.forward_backward"
            )
        if [parameter.data_ptr() for parameter in self._parameters] != self._places:
            raise UsageError(
                "a parameter was moved to other memory after its optimizer was sharded; move or convert the model "
                "first, then shard the optimizer"
            )
        for part, parameter, fragment in self._parts:
            gradient = parameter.grad
            if gradient is not None:
                part.grad = _laid_out_like(parameter, gradient)[fragment.start : fragment.stop]
        self._on_waiting(True)
        self._handover.begin()
        self._on_waiting(False)

    def _after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for part, _, _ in self._parts:
            part.grad = None
        self._on_waiting(True)
        self._handover.end()
        self._on_waiting(False)


def handover_within(
    group: Group, module: torch.nn.Module, share_weights: bool, device: torch.device, deadline_seconds: float
) -> Callable[[list[torch.nn.Parameter], list[list[Fragment]]], ParamSync]:
    """How the ranks of `group` hand over their parts: in shared memory where they can, else by the backend."""

    def memory_of(nbytes: int) -> NodeMemory | None:
        return share_or_none(
            group,
            lambda: NodeMemory(group, nbytes, deadline_seconds),
            "the backend gathers updated weights, same bits",
        )

    def make(parameters: list[torch.nn.Parameter], owned: list[list[Fragment]]) -> ParamSync:
        if not is_host(device):
            return Copied(group, parameters, owned, device)
        memory = memory_of(whole_bytes(parameters) if share_weights else boxes_bytes(parameters, owned))
        if memory is None or not share_weights:
            return Copied(group, parameters, owned, memory or device)
        tensors = {**dict(module.named_buffers()), **dict(module.named_parameters())}
        moved = set(parameters)
        named = {name: p for name, p in module.named_parameters() if p in moved}
        return OneMemory(memory, named, {name: t for name, t in tensors.items() if name not in named})

    return make


def _trained(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    for group in optimizer.param_groups:
        yield from (parameter for parameter in group["params"] if parameter.requires_grad)


def _laid_out_like(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor of the parameter's shape, flat, in the order of the parameter's memory."""
    if tensor.stride() != parameter.stride():
        tensor = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
    return flat(tensor)


def _part_of_state(value: Any, parameter: torch.Tensor, fragment: Fragment) -> Any:
    """What the optimizer already knows of this part; counters are every part's own."""
    whole = fragment.stop - fragment.start == parameter.numel()
    if whole or not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    return _laid_out_like(parameter, value)[fragment.start : fragment.stop].clone()
