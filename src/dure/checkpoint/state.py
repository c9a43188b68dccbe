"""The state: all that the next step depends on, as named tensors and plain facts. `capture` takes it from a replica,
`restore` puts it into one.

Random numbers, the order of samples and the schedule's value are functions of the seed and the step, so they need no
state: parameters, buffers, the optimizer's state and the cursor are all there is. Nothing here depends on how many
ranks there are: each rank captures a share of the tensors' bytes, and all shares together are the same whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dure.checkpoint.table import Table, TensorSpan
from dure.checkpoint.witness import LiveHash
from dure.comm.group import Group
from dure.device.copying import copy_into

FORMAT = 1
"""Of facts and files; a newer one is refused by name."""
MODEL, OPTIMIZER = "model/", "optimizer/"
"""What the names of weights, and of the optimizer's tensors, begin with."""

COUNTER = "step"
"""What torch's optimizers call the number of their steps, which is no element of a parameter of one element."""

Schedule = torch.optim.lr_scheduler.LRScheduler


@dataclass(frozen=True)
class Part:
    """What an optimizer that ranks hold in parts has of one parameter: its elements in the order of memory."""

    parameter: torch.nn.Parameter
    start: int
    stop: int


@dataclass(frozen=True)
class Sharing:
    """Who holds a sharded optimizer: the parts of this rank, and the ranks that have all of it together."""

    parts: Mapping[torch.Tensor, Part]
    """By the tensor that stands in the optimizer's groups."""
    ranks: Group
    node: int = 0
    nodes: int = 1
    """Every node holds all of it, so that each captures only its share of its parts."""


@dataclass(frozen=True)
class Share:
    """Which share of the state a rank captures."""

    part: int
    parts: int


@dataclass(frozen=True)
class Piece:
    """A run of a tensor's elements."""

    span: TensorSpan
    start: int
    stop: int
    values: torch.Tensor
    """The live tensor's own memory where it can be: copy it before the next step."""

    @property
    def nbytes(self) -> int:
        """Of this run."""
        return (self.stop - self.start) * self.span.dtype.itemsize

    @property
    def offset(self) -> int:
        """Where it begins in the whole state's memory, in bytes."""
        return self.span.start + self.start * self.span.dtype.itemsize


@dataclass(frozen=True)
class State:
    """A rank's share of the state before step `facts["step"]`, of which the facts and the table are everyone's."""

    facts: dict[str, Any]
    table: Table
    pieces: tuple[Piece, ...]
    alike: tuple[Piece, ...]
    """Those of the pieces that every rank holds too; not a sharded optimizer's."""
    witness: LiveHash | None = None
    """The fingerprint of the next share as this replica has it, to be taken before the next update."""

    def copy_into(self, whole: torch.Tensor) -> None:
        """Copy this rank's share to its place in a memory (uint8) of `table.nbytes` bytes."""
        copy_into(whole, [piece.offset for piece in self.pieces], [piece.values for piece in self.pieces])


@dataclass(frozen=True)
class WholeState:
    """A state with all its bytes in one memory."""

    facts: dict[str, Any]
    table: Table
    memory: torch.Tensor
    elsewhere: bool = False
    """Whether it was found in another place than the run's own storage."""

    def elements(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """A run of a tensor's elements, flat; a view."""
        span = self.table.by_name[name]
        size = span.dtype.itemsize
        end = span.numel if stop is None else stop
        return typed(self.memory, span.dtype, span.start + start * size, (end - start) * size)


def typed(memory: torch.Tensor, dtype: torch.dtype, start: int, nbytes: int) -> torch.Tensor:
    """Bytes of a memory as elements of a type."""
    return memory[start : start + nbytes].view(dtype)
