"""The mean gradient of a rank that meets nobody: one rank alone, or ranks that train apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dure.comm.reduce.exchanger import ALL_USED, NOT_FINITE, is_finite, largest
from dure.comm.reduce.hook import StepExchange
from dure.comm.reduce.subtree_stack import SubtreeStack


class OwnMean:
    """Turns the stack's sums into `.grad`, with the bits that the exchange would give: the same additions, and one
    multiplication. DDP's buckets and the communication thread have no part in it."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], stack: SubtreeStack) -> None:
        self._parameters = parameters
        self._stack = stack
        self._found, self._factor = torch.zeros(1), torch.zeros(1)
        self._plain = all(p.dtype == torch.float32 and p.is_cpu for p in parameters)

    def settle(self, step: StepExchange, *, all_used: bool) -> None:
        """After the last shard. `.grad` is the mean gradient then, zeros where no shard has samples."""
        totals = step.totals
        totals.look()
        if step.marks is not None:
            step.marks.as_vector(totals.as_vector().numel())
        count = totals.count
        step.scale = 1.0 / count if count else 0.0
        step.flags = ALL_USED if all_used else 0
        held = self._stack.take()
        if step.shard is None:  # no samples in this step
            for parameter in self._parameters:
                parameter.grad = torch.zeros_like(parameter)
            return
        sums = held[0]
        # Ranks that train apart may hold subtrees that no tree joins: from left to right, then.
        for right in held[1:]:
            torch._foreach_add_(sums, right)
        if not self._scale(sums, step.scale):
            step.flags |= NOT_FINITE
        for parameter, mean in zip(self._parameters, sums, strict=True):
            parameter.grad = mean if mean.dtype == parameter.dtype else mean.to(parameter.dtype)

    def _scale(self, sums: list[torch.Tensor], scale: float) -> bool:
        """Multiply in place; whether all results are numbers that the gradient's type holds."""
        if self._plain and 0.0 < scale <= 1.0:
            # One pass. It looks at the sums; a number times at most 1 is a number.
            self._found.zero_()
            torch._amp_foreach_non_finite_check_and_unscale_(sums, self._found, self._factor.fill_(scale))
            return not self._found.item()
        torch._foreach_mul_(sums, scale)
        limits = (largest(parameter.dtype) for parameter in self._parameters)
        return all(is_finite(mean, limit) for mean, limit in zip(sums, limits, strict=True))
