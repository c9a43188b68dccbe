"""Gradients that DDP has not synchronised yet, scaled by another factor on each rank: clipped too early."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.parallel import DistributedDataParallel

from dure.proof.detectors.report import Report, script_place

if TYPE_CHECKING:
    from dure.proof.detectors.watch import Watch

_ELEMENTS = 64
_PASSES = 8
"""Passes without synchronisation that are looked at."""
_CLOSE = 1e-4


class UnsyncedLook:
    """Keeps some elements of a gradient after a backward pass under no_sync, and looks at them before the next one."""

    def __init__(self, watch: Watch, number: int) -> None:
        self._watch, self._number = watch, number
        self._parameter: torch.nn.Parameter | None = None
        self._removed = False
        self._unsynced = False
        self._kept: torch.Tensor | None = None
        self._looked = 0

    def before_forward(self, model: DistributedDataParallel, *, synced: bool) -> None:
        """Before every training pass."""
        self._compare()
        self._unsynced = not synced
        if not synced and self._parameter is None and not self._removed:
            # Only scripts that use no_sync get a hook on a parameter.
            parameters = [p for p in model.module.parameters() if p.requires_grad]
            self._parameter = max(parameters, key=lambda p: min(p.numel(), _ELEMENTS))
            self._handle = self._parameter.register_post_accumulate_grad_hook(self._watch.guarded(self._keep))

    def before_update(self) -> None:
        """Before an optimizer's step: what is clipped from here on was synchronised, or is found to differ."""
        self._kept = None

    def _keep(self, parameter: torch.Tensor) -> None:
        if self._unsynced and parameter.grad is not None:
            self._kept = parameter.grad.detach().reshape(-1)[:_ELEMENTS].clone()

    def _compare(self) -> None:
        before, self._kept = self._kept, None
        if before is None or self._parameter is None:
            return
        gradient, board = self._parameter.grad, self._watch.board
        now = None if gradient is None else gradient.detach().reshape(-1)[:_ELEMENTS]
        largest = int(before.abs().argmax())
        factor = 1.0
        if now is not None and bool(now.any()) and float(before[largest]) != 0.0:
            factor = float(now[largest]) / float(before[largest])
        self._looked += 1
        if board is not None:
            told = board.publish(f"{self._number}/unsynced/{self._looked}", [factor, script_place()])
            if told is not None:
                self._judge([one for one, _ in told], told[0][1])
        if self._looked == _PASSES:
            self._handle.remove()
            self._parameter, self._removed = None, True

    def _judge(self, factors: list[float], place: str) -> None:
        if max(factors) - min(factors) <= _CLOSE * max(map(abs, factors)):
            return
        values = ", ".join(f"rank {rank} {factor:.3g}" for rank, factor in list(enumerate(factors))[:8])
        text = (
            f"gradients were clipped before they were synchronised (scaled by {values}): each rank by its own "
            "norm, and "
            "parts of the batch get other weights; clip once, after the last backward pass of an accumulation"
        )
        self._watch.tell(Report(text, "clip-before-sync", place))
