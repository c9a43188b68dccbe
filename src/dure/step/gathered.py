"""Measures that are no means (F1, AUC, a confusion matrix): computed from all samples' outputs at once.

Every rank keeps the outputs of its samples; all of them then go to every rank, each sample exactly once, in the order
of the dataset. So every rank computes the same from the same, and the number of ranks does not change a bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from dure.base.errors import ModelRefused, UsageError
from dure.comm.group import Group
from dure.data.seeds import seed_all, seed_of

Gathered = Callable[[torch.Tensor, torch.Tensor], Any]
"""(outputs, targets) of all samples, in order -> a number, a dict of numbers, or a tensor or list of them."""

_DTYPES = {str(t).removeprefix("torch."): t for t in (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)}  # fmt: skip
_HALVES = ("output", "target")


def confusion(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """How often class i (row) was taken for class j (column)."""
    classes = outputs.shape[1] if outputs.dim() > 1 else 2
    answers = _answers(outputs)
    wrong = ((targets < 0) | (targets >= classes)).nonzero()
    if len(wrong):
        raise ModelRefused(
            f"the target of sample {int(wrong[0])} is {int(targets[wrong[0]])}, of {classes} classes"
        )
    return torch.bincount(targets.long() * classes + answers, minlength=classes * classes).view(
        classes, classes
    )


def f1(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """The mean over classes of 2 · hits / (2 · hits + misses + false alarms); for two classes that of class 1."""
    table = confusion(outputs, targets).double()
    hits = table.diagonal()
    both = table.sum(0) + table.sum(1)
    scores = torch.where(both > 0, 2 * hits / both.clamp(min=1), torch.zeros_like(hits))
    return float(scores[1] if len(scores) == 2 else scores.mean())


def auroc(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """How often a sample of class 1 scores higher than one of class 0; ties count half. For two classes."""
    if outputs.dim() > 1 and outputs.shape[1] not in (1, 2):
        raise ModelRefused(f"auroc is for two classes, and the output has {outputs.shape[1]}")
    flat = outputs.dim() == 1 or outputs.shape[1] == 1
    scores = outputs.flatten().double() if flat else (outputs[:, 1] - outputs[:, 0]).double()
    positive = targets.flatten() == 1
    of_one, of_zero = int(positive.sum()), int((~positive).sum())
    if not of_one or not of_zero:
        return math.nan
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    ranks = (last - (counts.double() - 1) / 2)[place]  # tied scores share the mean of their ranks
    return float((ranks[positive].sum() - of_one * (of_one + 1) / 2) / (of_one * of_zero))


GATHERED: dict[str, Gathered] = {"f1": f1, "auroc": auroc, "confusion": confusion}


def _answers(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.argmax(1) if outputs.dim() > 1 and outputs.shape[1] > 1 else (outputs.flatten() > 0).long()


class Outputs:
    """The outputs and targets of this rank's samples."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._halves: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])

    def add(self, output: Any, target: Any, samples: int) -> None:
        """Of one micro-batch."""
        found = (getattr(output, "logits", output), target)
        for half, value, name in zip(self._halves, found, _HALVES, strict=True):
            if not isinstance(value, torch.Tensor) or not value.dim() or len(value) != samples:
                shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise ModelRefused(
                    f"the {name} of {samples} samples is {shape}; a metric over all samples needs a tensor with one "
                    "row per sample"
                )
            half.append(value.detach().cpu())

    def add_ids(self, ids: Iterable[int]) -> None:
        """The samples of the micro-batches just added, in order."""
        self._ids += ids

    def of_all(self, group: Group | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and targets of all ranks' samples, in the order of the dataset; a collective call."""
        own = [torch.cat(half) if half else None for half in self._halves]
        order = torch.tensor(self._ids, dtype=torch.int64)
        if group is None or group.size == 1:
            at = order.argsort()
            outputs, targets = own
            assert outputs is not None
            assert targets is not None
            return outputs[at], targets[at]
        told = [
            None if one is None else [list(one.shape), str(one.dtype).removeprefix("torch.")] for one in own
        ]
        everyones = [json.loads(text) for text in group.gather(json.dumps(told), "gathering outputs")]
        found = []
        for half, name in enumerate(_HALVES):
            rows, inner, dtype = _alike([one[half] for one in everyones], name)
            parts = []
            for rank, count in enumerate(rows):
                part = own[half] if rank == group.rank else None
                part = torch.empty(count, *inner, dtype=dtype) if part is None else part.contiguous()
                if count:
                    group.from_rank(rank, part, "gathering outputs")
                parts.append(part)
            found.append(torch.cat(parts))
        ids = []
        for rank, count in enumerate(rows):
            part = order if rank == group.rank else torch.empty(count, dtype=torch.int64)
            if count:
                group.from_rank(rank, part, "gathering outputs")
            ids.append(part)
        at = torch.cat(ids).argsort()
        return found[0][at], found[1][at]


def _alike(told: list[Any], name: str) -> tuple[list[int], list[int], torch.dtype]:
    """The rows of each rank, and the shape of a row and its type, which all ranks have alike."""
    kinds = {json.dumps([shape[1:], dtype]) for shape, dtype in (one for one in told if one is not None)}
    if len(kinds) > 1:
        raise ModelRefused(
            f"the {name}s of samples have different shapes or types ({' and '.join(sorted(kinds))}); a metric over "
            "all samples needs rows of one shape: pad them"
        )
    inner, dtype = json.loads(kinds.pop())
    return [0 if one is None else int(one[0][0]) for one in told], inner, _DTYPES[dtype]


def compute(
    measures: Mapping[str, Gathered], outputs: Outputs, seed: int, group: Group | None
) -> tuple[dict[str, float], dict[str, Any]]:
    """Each measure of all samples: numbers by name, and what the functions returned, as plain values."""
    everything = outputs.of_all(group)
    numbers: dict[str, float] = {}
    values: dict[str, Any] = {}
    for name, measure in measures.items():
        seed_all(seed_of(seed, "metric"))
        values[name] = _plain(measure(*everything), name)
        numbers |= _numbers(values[name], name)
    if group is not None:
        everyones = group.gather(json.dumps(values), "comparing metrics")
        odd = next((rank for rank, text in enumerate(everyones) if text != everyones[0]), None)
        if odd is not None:
            raise ModelRefused(
                f"a metric has other bits on rank {odd} than on rank 0, from the same outputs; it must depend on "
                "nothing else: no clock, no rank, no state"
            )
    return numbers, values


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, torch.Tensor) or (hasattr(value, "tolist") and hasattr(value, "dtype")):
        return _plain(value.tolist(), name)
    if isinstance(value, dict):
        return {str(key): _plain(inner, name) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, name) for inner in value]
    if isinstance(value, int | float):
        return value
    raise UsageError(
        f"the metric {name} returns a {type(value).__name__}; return numbers, a dict or lists of them"
    )


def _numbers(value: Any, name: str) -> dict[str, float]:
    if isinstance(value, dict):
        return {k: v for key, inner in value.items() for k, v in _numbers(inner, f"{name}.{key}").items()}
    if isinstance(value, list):
        return {k: v for at, inner in enumerate(value) for k, v in _numbers(inner, f"{name}.{at}").items()}
    return {name: float(value)}
