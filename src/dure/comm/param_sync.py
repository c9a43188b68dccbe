"""How the parts of the weights that each rank updated become everyone's: copied over, or one memory for all."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from dure.base.errors import ModelRefused
from dure.comm.group import Group, naming_the_wait
from dure.comm.shm_barrier import ShmBarrier, barrier_bytes
from dure.comm.shm_segment import share_segment

LINE_BYTES = 512
"""Parts start at multiples of this: four times what a kernel takes at once with the widest instructions."""
WHAT = "the exchange of updated parameters"


@dataclass(frozen=True)
class Fragment:
    """A run of one parameter's elements, in the order of its memory, that one rank updates."""

    parameter: int
    """Its position among the parameters that were cut."""
    start: int
    stop: int


class ParamSync(Protocol):
    """What happens before and after each rank updates its part. Used by one thread."""

    def begin(self) -> None:
        """Return when this rank may write to its part."""
        ...

    def end(self) -> None:
        """Return when this rank has everyone's parts."""
        ...

    def close(self) -> None:
        """Let go of whatever is shared."""
        ...


class NodeMemory:
    """A piece of memory that all ranks of a group write to and read, and a barrier of those ranks."""

    def __init__(self, group: Group, nbytes: int, deadline_seconds: float) -> None:
        """Raises OSError where memory cannot be shared; a collective call, to be made within `share_or_none`."""
        start = _lines(barrier_bytes(group.size, 0))
        shared = share_segment(group, start + nbytes, "sharing weights")
        self.barrier = ShmBarrier(shared, 0, deadline_seconds)
        self.bytes = torch.frombuffer(shared.bytes, dtype=torch.uint8)[start:]

    def close(self) -> None:
        """Let go of the descriptors; the memory lives as long as tensors look at it."""
        self.barrier.close()


class Copied:
    """Every rank has weights of its own; each puts its part into its box, and everyone reads all boxes.

    In the node's memory there are two sets of boxes, used in turn: who writes to a box has met everyone since it was
    last read, and the only cost is one barrier. Without such memory the backend gathers the boxes.
    """

    def __init__(
        self,
        group: Group,
        parameters: Sequence[torch.Tensor],
        owned: Sequence[Sequence[Fragment]],
        memory: NodeMemory | torch.device,
    ) -> None:
        """`memory` has room for `boxes_bytes`; or it is the device whose backend gathers."""
        self._group = group
        self._memory = memory if isinstance(memory, NodeMemory) else None
        turns, nbytes = (2 if self._memory else 1), _box_bytes(parameters, owned)
        if isinstance(memory, NodeMemory):
            whole = memory.bytes[: turns * group.size * nbytes]
        else:
            whole = torch.zeros(group.size * nbytes, dtype=torch.uint8, device=memory)
        self._boxes = whole.view(turns, group.size, nbytes)
        self._own = torch.zeros(0 if self._memory else nbytes, dtype=torch.uint8, device=whole.device)
        """What the backend sends."""
        self._copies = [self._plan(turn, parameters, owned) for turn in range(turns)]
        self._turn = 0

    def begin(self) -> None:
        """See `ParamSync`. Nobody else reads these weights."""

    def end(self) -> None:
        """See `ParamSync`."""
        send, receive = self._copies[self._turn]
        send.run()
        if self._memory is not None:
            self._memory.barrier.wait(WHAT)
        else:
            with naming_the_wait(self._group.rank, WHAT):
                dist.all_gather_single(self._boxes.view(-1), self._own, group=self._group.group)
        receive.run()
        self._turn = (self._turn + 1) % len(self._copies)

    def close(self) -> None:
        """See `ParamSync`."""
        self._copies.clear()
        if self._memory is not None:
            self._memory.close()

    def _plan(
        self, turn: int, parameters: Sequence[torch.Tensor], owned: Sequence[Sequence[Fragment]]
    ) -> tuple[_Copies, _Copies]:
        """What goes into this rank's box, and what comes out of the others'; views are made once."""
        send, receive = _Copies([], []), _Copies([], [])
        for rank, fragments in enumerate(owned):
            sends = rank == self._group.rank
            box = self._own if sends and self._memory is None else self._boxes[turn, rank]
            for (start, nbytes), fragment in zip(_in_box(parameters, fragments), fragments, strict=True):
                parameter = parameters[fragment.parameter]
                in_box = box[start : start + nbytes].view(parameter.dtype)
                here = flat(parameter)[fragment.start : fragment.stop]
                if sends:
                    send.add(in_box, here)
                else:
                    receive.add(here, in_box)
        return send, receive


class OneMemory:
    """All ranks of the node have one memory for the weights: what one writes is everyone's, and nothing is copied.

    Two barriers per update: nobody computes with the weights any more; all parts are written. A write to the
    weights outside of the update would be a write to everyone's, in the middle of their work; so it is refused
    where torch counts it (writes through `.data` are not counted).
    """

    def __init__(
        self,
        memory: NodeMemory,
        named: Mapping[str, torch.nn.Parameter],
        others: Mapping[str, torch.Tensor],
    ) -> None:
        """Move the weights, in place. `others` are tensors of the model that stay where they are."""
        _refuse_overlaps({**others, **named})
        self._memory = memory
        self._named = dict(named)
        start = 0
        for parameter in named.values():
            nbytes = parameter.numel() * parameter.element_size()
            there = memory.bytes[start : start + nbytes].view(parameter.dtype)
            there = there.as_strided(parameter.size(), parameter.stride())
            there.copy_(parameter.detach())  # the same bits from every rank
            parameter.data = there
            start += _lines(nbytes)
        self._versions = [parameter._version for parameter in named.values()]
        memory.barrier.wait("sharing weights")

    def begin(self) -> None:
        """See `ParamSync`."""
        for version, (name, parameter) in zip(self._versions, self._named.items(), strict=True):
            if parameter._version != version:
                raise ModelRefused(
                    f"something wrote to {name} outside of the update, but all ranks of the node share its memory; "
                    "let every rank have weights of its own: train.shard_optimizer = false, or in a script "
                    "share_weights=False"
                )
        self._memory.barrier.wait(WHAT)

    def end(self) -> None:
        """See `ParamSync`."""
        self._versions = [parameter._version for parameter in self._named.values()]
        self._memory.barrier.wait(WHAT)

    def close(self) -> None:
        """See `ParamSync`. The weights stay where they are, for as long as somebody looks at them."""
        self._memory.close()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in the order of memory, whatever the strides; the tensor is dense."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def whole_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """Bytes of all parameters together."""
    return sum(_lines(parameter.numel() * parameter.element_size()) for parameter in parameters)


def boxes_bytes(parameters: Sequence[torch.Tensor], owned: Sequence[Sequence[Fragment]]) -> int:
    """Bytes that `Copied` needs in a node's memory."""
    return 2 * len(owned) * _box_bytes(parameters, owned)


def _box_bytes(parameters: Sequence[torch.Tensor], owned: Sequence[Sequence[Fragment]]) -> int:
    """Bytes of the largest of all ranks' parts, in whole cache lines."""
    ends = (start + nbytes for fragments in owned for start, nbytes in _in_box(parameters, fragments))
    return _lines(max(ends, default=0))


@dataclass(frozen=True)
class _Copies:
    """Copies that are made at every update."""

    into: list[torch.Tensor]
    out_of: list[torch.Tensor]

    def add(self, into: torch.Tensor, out_of: torch.Tensor) -> None:
        self.into.append(into)
        self.out_of.append(out_of)

    def run(self) -> None:
        if self.into:
            torch._foreach_copy_(self.into, self.out_of)


def _in_box(parameters: Sequence[torch.Tensor], owned: Sequence[Fragment]) -> Iterator[tuple[int, int]]:
    """Where each fragment is in its owner's part: first byte and length; every one starts on a cache line."""
    start = 0
    for fragment in owned:
        nbytes = (fragment.stop - fragment.start) * parameters[fragment.parameter].element_size()
        yield start, nbytes
        start += _lines(nbytes)


def _lines(nbytes: int) -> int:
    return -(-nbytes // LINE_BYTES) * LINE_BYTES


def _refuse_overlaps(named: Mapping[str, torch.Tensor]) -> None:
    """Tensors that lie in each other would be torn apart by a move."""
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size(), name)
        for name, tensor in named.items()
        if tensor.numel()
    )
    for (_, end, name), (start, _, other) in itertools.pairwise(spans):
        if start < end:
            raise ModelRefused(
                f"{name} and {other} share memory without being one parameter, so the weights cannot be moved into "
                "shared memory; tie whole parameters, or do not shard the optimizer"
            )
