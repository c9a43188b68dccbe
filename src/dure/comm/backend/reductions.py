"""Tensors and operators of torch as what `collectives.c` combines: flat memory of a few dtypes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dure.base.errors import UsageError
from dure.comm.backend.channel import DTYPES, OPS

_BITWISE = ("BAND", "BOR", "BXOR")
_OF_BOOL = {"SUM": "MAX", "PRODUCT": "MIN"}
"""Numbers that are not 0 are true: with bytes of 0 and 1, other operators give the same."""
_LOW = (
    torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)  # fmt: skip
"""Combined in fp32, and rounded once."""


def op_name(op: object) -> str:
    """The name of a ReduceOp."""
    # Each with ==: a ReduceOp is no member of a tuple of its own constants.
    for name in OPS:
        if op == getattr(dist.ReduceOp, name):
            return name
    raise UsageError(f"{op} is an operator of NCCL's; the backend dure has {', '.join(OPS)}")


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements in one piece of memory; the tensor itself if they are."""
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def combinable(tensor: torch.Tensor, op: str) -> tuple[torch.Tensor, str]:
    """The elements as one of `DTYPES`, the tensor's own memory where that is possible, and the operator on them."""
    dtype = tensor.dtype
    if dtype.is_complex and op not in ("SUM", "AVG"):
        raise UsageError(f"{op} of {dtype} is not defined; use SUM or AVG")
    if op in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
        raise UsageError(f"{op} of {dtype} is not defined; it combines bits of integers")
    elements = flat(tensor.detach())
    if dtype in DTYPES:
        return elements, op
    if dtype == torch.bool:
        if op == "AVG":
            raise UsageError("AVG of torch.bool is not defined; use SUM, MIN or MAX")
        return elements.view(torch.uint8), _OF_BOOL.get(op, op)
    if dtype.is_complex and dtype != torch.complex32:
        return torch.view_as_real(elements.resolve_conj()), op
    if dtype in _LOW:
        return elements.to(torch.float32), op
    raise UsageError(f"{dtype} cannot be reduced; convert it first")


def put_back(result: torch.Tensor, tensor: torch.Tensor) -> None:
    """The result, in the tensor; nothing to do where it is there already."""
    if result.data_ptr() == tensor.data_ptr() and result.nbytes == tensor.nbytes:
        return
    with torch.no_grad():
        if tensor.is_complex() and not result.is_complex():
            result = torch.view_as_complex(result)
        elif tensor.dtype == torch.bool:
            result = result.view(torch.bool)
        tensor.copy_(result)
