"""The loss of one micro-batch: by the model's output and a loss, or by a function over the whole micro-batch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from dure.base.errors import JobError, ModelRefused
from dure.comm.topology import Topology
from dure.device.accelerator import is_host
from dure.step.loss import LossSum, SumAndCount, full_precision, sum_and_count
from dure.step.shadow import OnCorruption


@dataclass(frozen=True)
class Setting:
    """What a step depends on besides the model and the data."""

    topology: Topology
    shards: int
    seed: int
    sync: bool
    device: torch.device
    precision: str = "fp32"
    deadline_seconds: float = 150.0
    """How long a rank waits for another."""
    audit: float = 0.0
    """Share of steps in which another rank computes one shard again. Never changes a bit."""
    on_corruption: OnCorruption = "stop"
    """What follows when a rank computed wrongly."""


Forward = Callable[[Any, Any], Any]
"""(module, micro-batch) -> unreduced losses, or (sum, count)."""


@dataclass(frozen=True)
class WholeLoss:
    """A loss that the user computes from a whole micro-batch, with as many forward passes as it takes."""

    forward: Forward
    beside: tuple[torch.nn.Module, ...] = ()
    """Other models that the function may use. They get no gradients: those would stay on this rank, or be lost."""
    replicas: tuple[DistributedDataParallel, ...] = ()
    """All replicas of the team: called in the function, they must not start an exchange."""
    number: int = 0
    """How many losses were computed from the same batch before: each draws random numbers of its own."""

    @property
    def name(self) -> str:
        """For errors."""
        return f"forward {getattr(self.forward, '__name__', type(self.forward).__name__)}"

    @property
    def written_as(self) -> object:
        """What tells functions apart: a lambda in a loop is another object each time, with the same code."""
        return getattr(self.forward, "__code__", None) or self.forward

    def of(self, module: torch.nn.Module, part: object, setting: Setting) -> SumAndCount:
        """Sum and count."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_autocast(setting))
            stack.enter_context(_without_gradients(self.beside, module))
            stack.enter_context(_as_plain_modules(self.replicas))
            return sum_and_count(self.forward(module, to_device(part, setting.device)), self.name)


def modules_beside(forward: Forward, module: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that a function names besides the one it is given: in its closure, its defaults, its globals, or
    bound to it."""
    found: list[object] = []
    while isinstance(forward, functools.partial):
        found += [*forward.args, *forward.keywords.values()]
        forward = forward.func
    found.append(getattr(forward, "__self__", None))
    plain = getattr(forward, "__func__", forward)
    found += getattr(plain, "__defaults__", None) or ()
    found += (getattr(plain, "__kwdefaults__", None) or {}).values()
    for cell in getattr(plain, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # a name that is not assigned yet
            found.append(cell.cell_contents)
    code = getattr(plain, "__code__", None)
    own_globals = getattr(plain, "__globals__", {})
    found += [own_globals[name] for name in (code.co_names if code else ()) if name in own_globals]
    inner = (thing.module if isinstance(thing, DistributedDataParallel) else thing for thing in found)
    return [thing for thing in inner if isinstance(thing, torch.nn.Module) and thing is not module]


@contextlib.contextmanager
def _as_plain_modules(replicas: Iterable[DistributedDataParallel]) -> Iterator[None]:
    """Within `with`, to call a replica is to call the module inside it: DDP would exchange buckets' order and
    gradients, in a place that ranks with more shards than others come to more often."""
    for replica in replicas:
        replica.__dict__["forward"] = replica.module.__call__
    try:
        yield
    finally:
        for replica in replicas:
            del replica.__dict__["forward"]


@contextlib.contextmanager
def _without_gradients(modules: Iterable[torch.nn.Module], trained: torch.nn.Module) -> Iterator[None]:
    """Within `with`, no parameter of these modules is part of the graph, unless it is the trained one's too."""
    own = {id(parameter) for parameter in trained.parameters()}
    frozen = [p for m in modules for p in m.parameters() if p.requires_grad and id(p) not in own]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


PartLoss = LossSum | WholeLoss


def compute_loss(module: torch.nn.Module, part: object, loss: PartLoss, setting: Setting) -> SumAndCount:
    """The loss of one micro-batch, as sum and count."""
    if isinstance(loss, WholeLoss):
        return loss.of(module, part, setting)
    inputs, target = inputs_and_target(part, setting.device)
    output = forward(module, inputs, setting)
    return loss(output, target)


def forward(module: torch.nn.Module, inputs: Any, setting: Setting) -> Any:
    """Call the model with a batch's input: one tensor, several (tuple, list), or named ones (dict).

    What autocast made low precision comes back as fp32: the loss is computed outside of it.
    """
    if setting.precision == "fp32":
        return _called(module, inputs)
    with _autocast(setting):
        output = _called(module, inputs)
    return full_precision(output)


def _called(module: torch.nn.Module, inputs: Any) -> Any:
    try:
        if isinstance(inputs, torch.Tensor):
            return module(inputs)
        if isinstance(inputs, dict):
            return module(**inputs)
        if isinstance(inputs, list | tuple):
            return module(*inputs)
        return module(inputs)
    except Exception as error:
        if type(error).__name__ != "FailOnRecompileLimitHit":  # importing its module takes a second
            raise
        raise ModelRefused(
            "torch.compile met more shapes than it may compile for, and would run the others uncompiled, with "
            "other bits; pad the samples to fewer shapes, or set torch._dynamo.config.recompile_limit higher"
        ) from error


def _autocast(setting: Setting) -> contextlib.AbstractContextManager[Any]:
    low = setting.precision == "bf16"
    return torch.autocast(setting.device.type, dtype=torch.bfloat16) if low else contextlib.nullcontext()


def inputs_and_target(part: object, device: torch.device) -> tuple[Any, Any]:
    """A batch's two halves, on the device."""
    if not isinstance(part, list | tuple) or len(part) != 2:
        raise JobError(
            f"a batch is a {type(part).__name__}; the dataset's samples must be pairs (input, target), "
            "or data.collate must make them so; in a script, team.step(..., forward=...) takes batches of any form"
        )
    inputs, target = part
    if is_host(device):
        return inputs, target
    return to_device(inputs, device), to_device(target, device)


def to_device(value: Any, device: torch.device) -> Any:
    """All tensors in a batch, on the device."""
    if is_host(device):
        return value
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: to_device(inner, device) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_device(inner, device) for inner in value]
    return value
