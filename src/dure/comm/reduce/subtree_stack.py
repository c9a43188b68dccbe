"""This rank's own shards, added in tree order while they are computed: a stack of complete subtrees.

Accumulating into `.grad` would add from left to right, which is not the tree. So each shard's gradients
are moved out of `.grad`, onto a stack that joins two subtrees as soon as the tree does. It is never
deeper than log2 of the rank's shards.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from dure.comm import tree
from dure.comm.reduce.exchanger import adding_dtype


class SubtreeStack:
    """Sums of complete subtrees, from left to right; each is one tensor a parameter."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._place = {id(parameter): at for at, parameter in enumerate(self._parameters)}
        self._strides = [_strides_in_bucket(parameter) for parameter in self._parameters]
        self._adds_in_place = all(adding_dtype(p.dtype) == p.dtype for p in self._parameters)
        self._held: list[tuple[range, list[torch.Tensor]]] = []
        self.devices = sorted({parameter.device for parameter in self._parameters}, key=str)
        """Where the sums are."""
        self._left: list[torch.Tensor | None] | None = None
        """What a shard left in `.grad`, where the next one's gradients are added to it."""
        self._left_versions: list[int] = []

    def hold(self, shard: int, leaves: int, next_parts: int, apart: Collection[int] = ()) -> bool:
        """Whether the next shard's gradients may be added to this one's where they are, in `.grad`, as its backward
        pass computes them: where the tree adds those two, and the next shard has one micro-batch.

        Those of the positions `apart` are moved away all the same. `push` then takes both shards.
        """
        pair = range(shard, shard + 1), range(shard + 1, shard + 2)
        if next_parts != 1 or not self._adds_in_place or not tree.joins(*pair, leaves):
            return False
        self._left = [parameter.grad for parameter in self._parameters]
        self._left_versions = [-1 if left is None else left._version for left in self._left]
        for at, left in enumerate(self._left):
            # Gradients that share memory share a version too, which then does not tell which of them was added to.
            if at in apart or (left is not None and left.untyped_storage().nbytes() != left.nbytes):
                self._parameters[at].grad = None
        return True

    def push(self, shard: int, leaves: int) -> set[int]:
        """Move the shard's gradients from `.grad`, which is None then, onto the stack; with them those of the shard
        before, if that is held.

        Returns the positions of parameters without one: the shard did not use them, and zeros stand in for it.
        """
        gradients: list[torch.Tensor | None] = []
        for parameter in self._parameters:
            gradients.append(parameter.grad)
            parameter.grad = None
        if self._left is not None:
            left, self._left = self._left, None
            return self._push_pair(left, gradients, range(shard - 1, shard + 1), leaves)
        unused = {at for at, gradient in enumerate(gradients) if gradient is None}
        own = self._filled(gradients)
        covered = range(shard, shard + 1)
        if self._held and tree.joins(self._held[-1][0], covered, leaves):
            before, sums = self._held.pop()
            torch._foreach_add_(sums, own)
            self._join(range(before.start, covered.stop), sums, leaves)
        else:
            sums = own if self._adds_in_place else [g.to(adding_dtype(g.dtype)) for g in own]
            self._held.append((covered, sums))
        return unused

    def _push_pair(
        self, left: list[torch.Tensor | None], now: list[torch.Tensor | None], covered: range, leaves: int
    ) -> set[int]:
        unused = set()
        for at, (one, other, version) in enumerate(zip(left, now, self._left_versions, strict=True)):
            if one is not None and one is other and one._version != version:
                continue  # added in place
            if one is None and other is None:
                unused.add(at)
            elif one is None or other is None or one is other:
                # One of the two shards did not use it. Zeros stand in for it: -0 + 0 is 0.
                found = other if one is None else one
                assert found is not None
                now[at] = found.add_(0.0)
            else:
                now[at] = one.add_(other)  # kept apart
        self._join(covered, self._filled(now), leaves)
        return unused

    def _filled(self, gradients: list[torch.Tensor | None]) -> list[torch.Tensor]:
        return [
            torch.zeros_like(parameter) if gradient is None else gradient
            for parameter, gradient in zip(self._parameters, gradients, strict=True)
        ]

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

    def take(self) -> list[list[torch.Tensor]]:
        """Each held subtree's sums, from left to right; the stack is empty then."""
        held, self._held = self._held, []
        return [sums for _, sums in held]

    def clear(self) -> None:
        """Forget the step."""
        self._held = []
        self._left = None


def _strides_in_bucket(parameter: torch.Tensor) -> tuple[int, ...]:
    """How DDP lays a gradient out in its bucket: like the parameter if that has no gaps, else contiguous."""
    if torch.empty_like(parameter, device="meta").stride() == parameter.stride():  # only without gaps
        return parameter.stride()
    return torch.empty(parameter.shape, device="meta").stride()
