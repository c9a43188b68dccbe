"""Losses and metrics as sums with their counts, so that a mean over any number of ranks is right.

A mean of means weighs samples (or tokens) wrongly as soon as parts differ in size. So everything here is
a pair: the sum, and the number of things it is over; the division comes once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.nn.functional as F

from dure.base.errors import ModelRefused, UsageError

Count = float | torch.Tensor
SumAndCount = tuple[torch.Tensor, Count]
LossSum = Callable[[Any, Any], SumAndCount]

IGNORED = -100
"""Targets that torch's cross-entropy leaves out; they do not count."""


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> SumAndCount:
    """Over all targets but the ignored ones. Sequences may be (batch, length, classes)."""
    output = full_precision(output)
    if output.dim() == 2 and target.dim() == 1:
        pass  # nothing to lay out
    elif _classes_last(output, target):
        output, target = output.reshape(-1, output.shape[-1]), target.reshape(-1)
    elif not output.is_cpu:
        output, target = classes_to_end(output, target)
    total = F.cross_entropy(output, target, reduction="sum", ignore_index=IGNORED)
    if target.is_floating_point():  # class probabilities
        return total, target.numel() / target.shape[1]
    return total, _counted(target)


def mse(output: torch.Tensor, target: torch.Tensor) -> SumAndCount:
    """Over all elements."""
    if output.shape != target.shape:
        raise ModelRefused(
            f"mse: the output is {tuple(output.shape)} and the target {tuple(target.shape)}; make them the same"
        )
    return F.mse_loss(full_precision(output), full_precision(target), reduction="sum"), float(output.numel())


def accuracy(output: torch.Tensor, target: torch.Tensor) -> SumAndCount:
    """Right answers over all targets but the ignored ones."""
    counted = target != IGNORED
    answer = output.argmax(dim=-1 if _classes_last(output, target) else 1)
    return ((answer == target) & counted).sum(), _counted(target)


def _counted(target: torch.Tensor) -> Count:
    """Targets that are not ignored. On an accelerator a tensor, for which nobody waits yet."""
    if target.is_cpu:  # a third of the time that torch takes for few
        return float(numpy.count_nonzero(target.numpy() != IGNORED))
    return (target != IGNORED).sum()


def classes_to_end(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, C, d1, …) and its targets as (samples, classes) and (samples): accelerators have no deterministic kernel for
    classes in the second dimension. On CPUs the two are other kernels with other bits, so there it is not done."""
    if output.dim() <= 2:
        return output, target
    flat = output.movedim(1, -1).reshape(-1, output.shape[1])
    if target.is_floating_point():  # class probabilities, as (N, C, d1, …) too
        return flat, target.movedim(1, -1).reshape(-1, target.shape[1])
    return flat, target.reshape(-1)


def full_precision(output: Any) -> Any:
    """All low-precision tensors in a model's output as fp32, so that a loss is neither computed nor summed in them."""
    if isinstance(output, torch.Tensor):
        return output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
    if isinstance(output, Mapping):  # also transformers' outputs, which keep their class
        inner = {key: full_precision(value) for key, value in output.items()}
        unchanged = all(inner[key] is value for key, value in output.items())
        return output if unchanged else type(output)(inner)  # type: ignore[call-arg]
    if isinstance(output, list | tuple):
        parts = [full_precision(value) for value in output]
        if all(part is value for part, value in zip(parts, output, strict=True)):
            return output
        is_named = isinstance(output, tuple) and type(output) is not tuple
        return type(output)(*parts) if is_named else type(output)(parts)
    return output


def _classes_last(output: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether the classes are the last dimension (sequences) and not torch's second one (pictures)."""
    last = output.dim() == target.dim() + 1 and output.shape[:-1] == target.shape
    second = output.dim() > 2 and output.shape[:1] + output.shape[2:] == target.shape
    if last and second:
        raise ModelRefused(
            f"cross_entropy: the output is {tuple(output.shape)} and the target {tuple(target.shape)}, so the classes "
            "may be the second dimension or the last; flatten both to (samples, classes) and (samples)"
        )
    return last


LOSSES: dict[str, LossSum] = {"cross_entropy": cross_entropy, "mse": mse}
METRICS: dict[str, LossSum] = {"accuracy": accuracy}


def as_sum(loss: Callable[[Any, Any], Any] | str, what: str = "the loss") -> LossSum:
    """A loss, by name or as the user wrote it, as sum and count; `what` names it in errors.

    A callable returns unreduced losses (one per sample or token), or the pair (sum, count). torch's own
    functions and loss modules are taken with reduction="sum" in place of the mean.
    """
    if isinstance(loss, str):
        known = {**LOSSES, **METRICS}
        if loss not in known:
            raise UsageError(f"{what} {loss!r} is not known; use {', '.join(known)}, or give a function")
        return known[loss]
    if isinstance(loss, _Summed) or loss in (*LOSSES.values(), *METRICS.values()):
        return loss
    if loss in (F.cross_entropy, F.mse_loss):
        return cross_entropy if loss is F.cross_entropy else mse
    if isinstance(loss, torch.nn.CrossEntropyLoss | torch.nn.MSELoss) and _is_plain(loss):
        return cross_entropy if isinstance(loss, torch.nn.CrossEntropyLoss) else mse
    if not callable(loss):
        raise UsageError(f"{what} is a {type(loss).__name__}; give a function of (output, target)")
    return _Summed(loss, what)


@dataclass(frozen=True)
class _Summed:
    """A user's own loss or metric, as sum and count."""

    loss: Callable[[Any, Any], Any]
    what: str

    def __call__(self, output: Any, target: Any) -> SumAndCount:
        name = f"{self.what} {getattr(self.loss, '__name__', type(self.loss).__name__)}"
        return sum_and_count(self.loss(output, target), name)


def sum_and_count(result: Any, name: str) -> SumAndCount:
    """What a user's function returned, as sum and count; `name` is the function's, for errors."""
    if isinstance(result, tuple):
        if len(result) != 2 or not isinstance(result[0], torch.Tensor) or result[0].dim():
            raise ModelRefused(f"{name} returns a tuple that is not the pair (sum, count)")
        count = result[1]
        on_device = isinstance(count, torch.Tensor) and not count.is_cpu
        return result[0], count if on_device else float(count)
    if not isinstance(result, torch.Tensor):
        raise ModelRefused(
            f'{name} returns a {type(result).__name__}; return unreduced values (reduction="none"), one per sample '
            "or token, or the pair (sum, count), as tensors"
        )
    if result.dim() == 0:
        raise ModelRefused(
            f"{name} returns one number; a mean of means would weigh shards wrongly. Return unreduced values "
            '(reduction="none") or the pair (sum, count)'
        )
    return full_precision(result).sum(), float(result.numel())


def _is_plain(loss: torch.nn.Module) -> bool:
    """Whether a loss module has no setting that changes what the named loss does."""
    return (
        getattr(loss, "weight", None) is None
        and getattr(loss, "label_smoothing", 0.0) == 0.0
        and getattr(loss, "ignore_index", IGNORED) == IGNORED
        and loss.reduction in ("mean", "sum")
    )
