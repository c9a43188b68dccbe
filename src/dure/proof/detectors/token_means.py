"""A mean over each rank's own tokens, averaged over ranks: tokens of ranks that have few count more.

Told by the gradient of the model's logits alone. Of a cross entropy, a row of it is (softmax - one hot) times a
factor; rows of padding are zeros. Where ranks have other numbers of rows, and factor times rows is the same on all of
them, each took its own mean.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from dure.proof.detectors.report import Report

if TYPE_CHECKING:
    from dure.proof.detectors.watch import Watch

_PASSES = 3
_CLOSE = 0.01
_LEAST = 0.01
"""Numbers of tokens that differ by less hardly matter."""


class LogitsLook:
    """Looks at the gradients of a model's logits in its first passes."""

    def __init__(self, watch: Watch, number: int) -> None:
        self._watch, self._number = watch, number
        self._begun = 0
        self._found: list[tuple[int, float]] = []
        """By pass: rows that count, and the factor."""

    def look(self, output: Any, place: str) -> None:
        """After a training pass."""
        if self._begun == _PASSES:
            return
        logits = next(_logits_in(output), None)
        if logits is None:
            return
        self._begun += 1
        values = logits.detach()
        held = weakref.ref(self)

        def on_gradient(gradient: torch.Tensor) -> None:
            own = held()
            if own is not None:
                own._note(values, gradient, place)

        logits.register_hook(self._watch.guarded(on_gradient))

    def _note(self, logits: torch.Tensor, gradient: torch.Tensor, place: str) -> None:
        classes = logits.shape[-1]
        rows = gradient.detach().reshape(-1, classes)
        counted = (rows != 0).any(dim=1).nonzero().reshape(-1)
        factors = [
            _factor(logits.reshape(-1, classes)[at].double(), rows[at].double())
            for at in (counted[:1].tolist() + counted[-1:].tolist())
        ]
        known = len(factors) == 2 and factors[0] > 0 and _close(*factors)
        self._found.append((len(counted), factors[0] if known else 0.0))
        board = self._watch.board
        if len(self._found) == _PASSES and board is not None:
            told = board.publish(f"{self._number}/tokens", self._found)
            if told is not None:
                self._judge(told, place)

    def _judge(self, told: list[list[list[float]]], place: str) -> None:
        for ranks in zip(*told, strict=True):
            counts, factors = [one[0] for one in ranks], [one[1] for one in ranks]
            shares = [count * factor for count, factor in ranks]
            if min(factors) <= 0 or max(counts) - min(counts) <= _LEAST * max(counts):
                return
            if not all(_close(one, other) for one, other in itertools.pairwise(shares)):
                return
        counts = [int(one[0]) for one in (rank[-1] for rank in told)]
        values = ", ".join(f"rank {rank} {count}" for rank, count in list(enumerate(counts))[:8])
        text = (
            f"the loss is a mean over each rank's own tokens, and ranks have different numbers of them ({values} "
            "in one "
            "pass): DDP's mean of means weights tokens by rank; sum the loss, divide by the number of tokens of "
            "all ranks "
            "(all_reduce) and multiply by the number of ranks (team.step does)"
        )
        self._watch.tell(Report(text, "mean-of-means", place))


def _logits_in(output: Any) -> Iterator[torch.Tensor]:
    from dure.proof.detectors.ddp import tensors_in

    for tensor in tensors_in(output):
        if tensor.is_floating_point() and tensor.requires_grad and tensor.ndim >= 2 and tensor.shape[-1] > 2:
            yield tensor


def _factor(logits: torch.Tensor, gradient: torch.Tensor) -> float:
    """By which (softmax - one hot) was multiplied; 0 where it is no such thing."""
    softmax = torch.softmax(logits, 0)
    target = int(gradient.argmin())
    others = softmax.clone()
    others[target] = 0
    at = int(others.argmax())
    factor = float(gradient[at] / softmax[at])
    at_target = factor * (float(softmax[target]) - 1.0)
    return factor if factor > 0 and _close(at_target, float(gradient[target])) else 0.0


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= _CLOSE * max(abs(one), abs(other))
