"""The state: all that the next step depends on, as named tensors and plain facts. `capture` takes it from a replica,
`restore` puts it into one.

Random numbers, the order of samples and the schedule's value are functions of the seed and the step, so they need no
state: parameters, buffers, the optimizer's state and the cursor are all there is. Nothing here depends on how many
ranks there are: each rank captures a share of the tensors' bytes, and all shares together are the same whole.

`Table` is the layout of the tensors' bytes. `LiveHash` is the hash of the neighbour's share: a state is put together
from all ranks' shares, so each rank also hashes, in its own replica, the share that the next rank hands over. No
state is kept or saved that was not proved equal that way: a replica that went wrong would pass its share on to everyone
at the next restart. Weights and optimizer state do not change between two updates, so the hash is taken beside the next
forward and backward pass; buffers do, so those are copied first.
"""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import xxhash

from dure.base.errors import CheckpointError
from dure.base.say import printable
from dure.comm.group import Group
from dure.device.accelerator import is_host
from dure.device.copying import copy_into, reader
from dure.device.fingerprint import raw_bytes
from dure.device.streams import ready_now

LINE_BYTES = 64
"""Tensors start, and are cut, at multiples of this: no element of any type is cut in two."""
HASH_SECONDS = 600.0
FORMAT = 1
"""Of facts and files; a newer one is refused by name."""
MODEL, OPTIMIZER, EXTRA = "model/", "optimizer/", "extra/"
"""What the names of weights, of the optimizer's tensors, and of a script's own tensors begin with."""
AVERAGE = "average"
"""Among the extra values of a job's state: the moving average of its weights."""
COUNTER = "step"
"""What torch's optimizers call the number of their steps, which is no element of a parameter of one element."""
Schedule = torch.optim.lr_scheduler.LRScheduler
_TUPLE, _PAIRS, _COUNTER = "(tuple)", "(pairs)", "(counter)"


@dataclass(frozen=True)
class TensorSpan:
    """One tensor, and the bytes of the whole state's memory that are its own."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes, without the gap to the next."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Table:
    """All tensors of a state."""

    spans: tuple[TensorSpan, ...]

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> Table:
        """Lay them out one after the other."""
        return _laid_out(tuple(tensors))

    @cached_property
    def nbytes(self) -> int:
        """Of the memory that holds them all."""
        last = self.spans[-1] if self.spans else None
        return 0 if last is None else last.start + -(-last.nbytes // LINE_BYTES) * LINE_BYTES

    @cached_property
    def by_name(self) -> dict[str, TensorSpan]:
        """Each by its name."""
        return {span.name: span for span in self.spans}

    @cached_property
    def json(self) -> str:
        """What `to_plain` gives, as text."""
        return json.dumps(self.to_plain())

    def to_plain(self) -> list[list[Any]]:
        """For JSON."""
        return [[p.name, str(p.dtype).removeprefix("torch."), list(p.shape)] for p in self.spans]

    @classmethod
    def from_plain(cls, told: Any) -> Table:
        """What `to_plain` gave; CheckpointError when it cannot be that."""
        try:
            return cls.of((name, dtype_named(dtype), tuple(map(int, shape))) for name, dtype, shape in told)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"its list of tensors cannot be read ({error})") from None


@lru_cache(maxsize=4)
def _laid_out(tensors: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]) -> Table:
    """A run has the same table at every step, and its steps wait for it."""
    spans, start = [], 0
    for name, dtype, shape in tensors:
        span = TensorSpan(name, dtype, shape, start)
        spans.append(span)
        start += -(-span.nbytes // LINE_BYTES) * LINE_BYTES
    return Table(tuple(spans))


def dtype_named(name: str) -> torch.dtype:
    """The type that torch calls so."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(
            f"it has a tensor of type {printable(name, 40)}, which this torch does not know"
        )
    return found


def cut(spans: Iterable[TensorSpan], part: int, parts: int) -> Iterator[tuple[TensorSpan, int, int]]:
    """The `part`-th of `parts` about equal shares of these tensors: tensor, first element, end."""
    known = [(span, -(-span.nbytes // LINE_BYTES)) for span in spans]
    lines = sum(length for _, length in known)
    first, end = part * lines // parts, (part + 1) * lines // parts
    at = 0
    for span, length in known:
        low, high = max(first, at) - at, min(end, at + length) - at
        if low < high:
            line = LINE_BYTES // span.dtype.itemsize
            yield span, low * line, min(high * line, span.numel)
        at += length


def disagreeing(shared: Sequence[str], neighbours: Sequence[str]) -> list[int]:
    """The parts that the rank before has other bits of. `shared` are the hashes of each rank's own share, `neighbours`
    of the next rank's share in its replica; both by rank."""
    parts = len(shared)
    return [part for part in range(parts) if shared[part] != neighbours[(part - 1) % parts]]


def fingerprint_of(runs: Iterable[tuple[int, memoryview | bytes]]) -> str:
    """Of runs of bytes at these places of a state. Short gaps between tensors count as zeros: they are there too."""
    digest, end = xxhash.xxh3_64(), 0
    for start, data in runs:
        if 0 < start - end < LINE_BYTES and end:
            digest.update(bytes(start - end))
        digest.update(data)
        end = start + len(data)
    return digest.hexdigest()


class LiveHash:
    """The fingerprint of pieces of the live replica; to be taken before the next update."""

    def __init__(self, runs: Iterable[tuple[int, torch.Tensor]]) -> None:
        """`runs` are flat tensors, each with its offset in the state."""
        self._runs = sorted(runs, key=lambda run: run[0])
        devices = {values.device for _, values in self._runs}
        self._ready = {device: ready_now(device) for device in devices}
        self._taken = threading.Event()
        self.value = ""

    def take(self) -> str:
        """Compute it, in whatever thread."""
        try:
            self.value = fingerprint_of((start, self._bytes(values)) for start, values in self._runs)
        finally:
            self._runs = []  # the live tensors are the next step's
            self._taken.set()
        return self.value

    def _bytes(self, values: torch.Tensor) -> memoryview:
        if is_host(values.device) or not values.numel():
            return raw_bytes(values)
        memory = torch.empty(values.nbytes, dtype=torch.uint8)
        reader().copy(memory, [0], [values], self._ready[values.device])
        return raw_bytes(memory)

    def wait(self) -> None:
        """Return when it is taken: the replica may change."""
        if not self._taken.wait(HASH_SECONDS):
            raise CheckpointError(f"a share of the state was not hashed within {HASH_SECONDS:.0f} s")


def is_not_finite(values: torch.Tensor) -> bool:
    """Whether a tensor of numbers has one that is NaN or infinite."""
    if not values.is_floating_point() or not values.numel():
        return False
    low, high = torch.aminmax(values)  # both are NaN as soon as one element is
    return not bool(torch.isfinite(low) & torch.isfinite(high))


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
    neighbour: LiveHash | None = None
    """The hash of the next rank's share in this replica, to be taken before the next update."""

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


def to_plain(value: Any, what: str) -> Any:
    """`value` as JSON can say it. Tuples, and tables whose keys are no texts, are marked as what they are.

    Floats are safe: JSON has their shortest digits that read back as the same bits.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [to_plain(inner, what) for inner in value]
    if type(value) is tuple:
        return {_TUPLE: [to_plain(inner, what) for inner in value]}
    if type(value) is dict and all(type(key) is str and not key.startswith("(") for key in value):
        return {key: to_plain(inner, f"{what}.{key}") for key, inner in value.items()}
    if type(value) in (dict, Counter):
        mark = _COUNTER if type(value) is Counter else _PAIRS
        return {mark: [[to_plain(key, what), to_plain(inner, what)] for key, inner in value.items()]}
    raise CheckpointError(
        f"{what} is a {type(value).__name__}, which a checkpoint cannot hold: it has tensors, numbers, texts, lists "
        "and tables"
    )


def from_plain(value: Any) -> Any:
    """The inverse of `to_plain`."""
    if isinstance(value, list):
        return [from_plain(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {_TUPLE}:
        return tuple(from_plain(inner) for inner in value[_TUPLE])
    for mark, kind in ((_PAIRS, dict), (_COUNTER, Counter)):
        if set(value) == {mark}:
            return kind({from_plain(key): from_plain(inner) for key, inner in value[mark]})
    return {key: from_plain(inner) for key, inner in value.items()}
