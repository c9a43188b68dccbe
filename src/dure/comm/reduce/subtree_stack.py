"""This rank's own shards, added in tree order while they are computed: a stack of complete subtrees.

Accumulating into `.grad` would add from left to right, which is not the tree. So each shard's gradients
are moved out of `.grad`, onto a stack that joins two subtrees as soon as the tree does. It is never
deeper than log2 of the rank's shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dure.comm import tree
from dure.comm.reduce.exchanger import adding_dtype


class SubtreeStack:
    """Sums of complete subtrees, from left to right; each is one tensor a parameter."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._place = {id(parameter): at for at, parameter in enumerate(self._parameters)}
        self._strides = [_strides_in_bucket(parameter) for parameter in self._parameters]
        self._held: list[tuple[range, list[torch.Tensor]]] = []
        self.devices = sorted({parameter.device for parameter in self._parameters}, key=str)
        """Where the sums are."""

    def push(self, shard: int, leaves: int) -> set[int]:
        """Move the shard's gradients from `.grad`, which is None then, onto the stack.

        Returns the positions of parameters without one: the shard did not use them, and zeros stand in for it.
        """
        gradients, unused = [], set()
        for at, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter)
                unused.add(at)
            parameter.grad = None
            gradients.append(gradient)
        covered = range(shard, shard + 1)
        if self._held and tree.joins(self._held[-1][0], covered, leaves):
            left, sums = self._held.pop()
            torch._foreach_add_(sums, gradients)
            self._join(range(left.start, covered.stop), sums, leaves)
        else:
            self._held.append(
                (covered, [gradient.to(adding_dtype(gradient.dtype)) for gradient in gradients])
            )
        return unused

    def _join(self, covered: range, sums: list[torch.Tensor], leaves: int) -> None:
        while self._held and tree.joins(self._held[-1][0], covered, leaves):
            left, larger = self._held.pop()
            torch._foreach_add_(larger, sums)
            covered, sums = range(left.start, covered.stop), larger
        self._held.append((covered, sums))

    def top_joins(self, shard: int, leaves: int) -> int:
        """How many held subtrees, from the top, the next shard's gradients will be added to."""
        covered, count = range(shard, shard + 1), 0
        for held, _ in reversed(self._held):
            if not tree.joins(held, covered, leaves):
                break
            covered, count = range(held.start, covered.stop), count + 1
        return count

    def held_for(self, parameters: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Each held subtree's sums for these parameters, from left to right."""
        places = [self._place[id(parameter)] for parameter in parameters]
        return [[sums[at] for at in places] for _, sums in self._held]

    def views_of(
        self, flat: torch.Tensor, parameters: Sequence[torch.Tensor], offsets: Sequence[int]
    ) -> list[torch.Tensor]:
        """The gradients of these parameters inside a bucket (or a tensor like one), in DDP's own layout."""
        return [
            flat.as_strided(
                parameter.size(), self._strides[self._place[id(parameter)]], flat.storage_offset() + offset
            )
            for parameter, offset in zip(parameters, offsets, strict=True)
        ]

    def clear(self) -> None:
        """Forget the step."""
        self._held = []


def _strides_in_bucket(parameter: torch.Tensor) -> tuple[int, ...]:
    """How DDP lays a gradient out in its bucket: like the parameter if that has no gaps, else contiguous."""
    if torch.empty_like(parameter, device="meta").stride() == parameter.stride():  # only without gaps
        return parameter.stride()
    return torch.empty(parameter.shape, device="meta").stride()
