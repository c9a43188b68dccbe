"""The fixed order in which the shards' gradients are added: a balanced binary tree over the shards.

Floating-point addition is not associative, so the order decides the bits. Node (level k, index i) of the
tree covers the leaves [i·2ᵏ, (i+1)·2ᵏ), cut off at the number of leaves:

    leaves 0 1 2 3 4      ((0+1) + (2+3)) + 4

A run of neighbouring leaves is a list of complete subtrees, and subtrees can be joined only where the
tree joins them. So whoever holds which leaves, the sum at the root is the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence


def joins(left: range, right: range, leaves: int) -> bool:
    """Whether `left` and `right` are the two children of one node of the tree."""
    size = len(left)
    return (
        size & (size - 1) == 0
        and left.start % (2 * size) == 0
        and left.stop == right.start
        and right.stop == min(left.start + 2 * size, leaves)
    )


def join_order(pieces: Sequence[range], leaves: int) -> tuple[list[tuple[int, int]], list[int]]:
    """How neighbouring subtrees, in order, are joined.

    Returns the additions (left, right), by position in `pieces`, each meaning left ← left + right, and
    the positions that hold what remains: one root when the pieces cover all leaves.
    """
    additions: list[tuple[int, int]] = []
    held: list[tuple[range, int]] = []
    for position, covered in enumerate(pieces):
        held.append((covered, position))
        while len(held) > 1 and joins(held[-2][0], held[-1][0], leaves):
            right, right_at = held.pop()
            left, left_at = held.pop()
            additions.append((left_at, right_at))
            held.append((range(left.start, right.stop), left_at))
    return additions, [position for _, position in held]


def subtrees(run: range, leaves: int) -> list[range]:
    """The largest complete subtrees that make up a run of leaves, from left to right: what `join_order` leaves of its
    single leaves, found without looking at each of them."""
    found, start = [], run.start
    while start < run.stop:
        size = 1
        while start % (2 * size) == 0 and start + size < leaves and min(start + 2 * size, leaves) <= run.stop:
            size *= 2
        found.append(range(start, min(start + size, leaves)))
        start = found[-1].stop
    return found


def tree_sum(values: Sequence[float]) -> float:
    """The sum of one number a leaf, in tree order; 0.0 without leaves."""
    if not values:
        return 0.0
    sums = list(values)
    for left, right in _additions(len(sums)):
        sums[left] += sums[right]
    return sums[0]


@functools.lru_cache(maxsize=64)
def _additions(leaves: int) -> list[tuple[int, int]]:
    """Of single leaves; the same at every step."""
    return join_order([range(leaf, leaf + 1) for leaf in range(leaves)], leaves)[0]
