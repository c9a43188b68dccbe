"""Kinds of a step in turn, in the same ranks: so that whatever else the machine does comes to all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

Figures = dict[str, list[tuple[float, float]]]
"""By kind, of each round: seconds and CPU-seconds of a step on this rank."""


def in_turn(kinds: Mapping[str, Callable[[], object]], rounds: int, steps: int) -> Figures:
    """So many rounds of so many steps of each kind, after one round to warm up; each kind comes first in turn."""
    found: Figures = {kind: [] for kind in kinds}
    order = list(kinds)
    for number in range(rounds + 1):
        order.append(order.pop(0))
        for kind in order:
            began, cpu_began = time.perf_counter(), time.process_time()
            for _ in range(steps):
                kinds[kind]()
            seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
            if number:
                found[kind].append((seconds / steps, cpu_seconds / steps))
    return found


def of_all_ranks(figures: Sequence[Figures], kind: str) -> list[float]:
    """CPU-seconds of a step on all ranks together, by round."""
    return [sum(rank[kind][at][1] for rank in figures) for at in range(len(figures[0][kind]))]


def more_in(figures: Sequence[Figures], kind: str, than: str) -> float:
    """CPU-seconds that a step of one kind takes more than one of another: the median over rounds, whose two halves
    share whatever else the machine did meanwhile."""
    pairs = zip(of_all_ranks(figures, kind), of_all_ranks(figures, than), strict=True)
    return statistics.median(one - other for one, other in pairs)


def cpu_seconds_of(call: Callable[[int], object], repeats: int) -> float:
    """Of one call on this thread, the median: no other process's work is in it, but for caches."""
    found = []
    for number in range(repeats):
        began = time.thread_time()
        call(number)
        found.append(time.thread_time() - began)
    return statistics.median(found)
