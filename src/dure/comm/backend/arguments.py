"""What torch hands to a process group: tensors in lists of several forms, options or their short forms."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dure.base.errors import UsageError

Tensors = Sequence[torch.Tensor]


def several(tensors: Tensors | torch.Tensor) -> list[torch.Tensor]:
    """One tensor, or several, as a list."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def options_of(kind: Any, opts: Any, timeout: Any, more: dict[str, Any]) -> Any:
    """Options, from torch's own or from the short forms: an operator or a root, and a timeout."""
    if isinstance(opts, kind):
        return opts
    made = kind()
    for value in (opts, timeout, *more.values()):
        if isinstance(value, timedelta):
            made.timeout = value
        elif isinstance(value, dist.ReduceOp | dist.ReduceOp.RedOpType):
            made.reduceOp = value
        elif isinstance(value, int):
            made.rootRank = value
    if hasattr(made, "asyncOp"):
        made.asyncOp = True
    return made


def parts_of(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Equal parts, in order."""
    if not tensor.is_contiguous():
        raise UsageError("the output of an all-gather into one tensor must be contiguous")
    return list(tensor.detach().view(-1).chunk(count)) if tensor.numel() else [tensor] * count


def refuse_other_sizes(parts: Tensors, whole: torch.Tensor, count: int) -> None:
    """Raise unless there is a part for every rank, each as large as the other side's tensor."""
    if len(parts) != count:
        raise ValueError(f"{len(parts)} tensors for {count} ranks; give one for each")
    for rank, part in enumerate(parts):
        if part.numel() != whole.numel() or part.dtype != whole.dtype:
            raise ValueError(
                f"the tensor for rank {rank} has {part.numel()} elements of {part.dtype}, and this rank's "
                f"{whole.numel()} of {whole.dtype}; all must be alike"
            )


def refuse_other_size(large: torch.Tensor, small: torch.Tensor, count: int) -> None:
    """Raise unless one tensor is `count` times as large as the other."""
    if large.numel() != small.numel() * count or large.dtype != small.dtype:
        raise ValueError(
            f"{large.numel()} elements of {large.dtype} are not {count} times {small.numel()} of {small.dtype}"
        )
