"""The process group of the backend "dure".

Collectives that shared memory makes faster are done here; the others, and all of them where ranks are on several nodes,
are Gloo's, by a group of its own inside. Every method that torch's C++ looks for in Python is defined: where one is
not, torch calls its own with Python's lock held, which can wait for ever.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from dure.base.errors import PeerLost, UsageError
from dure.comm.backend.arguments import (
    Tensors,
    options_of,
    parts_of,
    refuse_other_size,
    refuse_other_sizes,
    several,
)
from dure.comm.backend.by_gloo import ByGloo
from dure.comm.backend.channel import (
    ALL_GATHER,
    ALL_REDUCE,
    BARRIER,
    BROADCAST,
    DIRECT_BYTES,
    DTYPES,
    REDUCE_DIRECT,
    REDUCE_SCATTER,
    Collective,
)
from dure.comm.backend.eager_only import eager_only
from dure.comm.backend.reductions import combinable, flat, op_name, put_back
from dure.comm.backend.store_group import StoreGroup, share_channel
from dure.comm.backend.work import DureWork, InOrder
from dure.comm.process_groups import keep_process_groups
from dure.device.accelerator import is_host

_c10d: Any = dist.distributed_c10d
"""Has the options' classes, which torch.distributed does not export."""
Work = Any
"""torch's own, of Gloo, or a `DureWork`."""
_alive: weakref.WeakSet[ProcessGroupDure] = weakref.WeakSet()


class ProcessGroupDure(ByGloo, _c10d.ProcessGroup):  # type: ignore[misc]  # torch's stubs differ from torch
    """Ranks that reduce through shared memory, in a fixed order."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        """A collective call of the group's ranks."""
        super().__init__(rank, size)
        keep_process_groups()
        self._pid = os.getpid()
        self._own = rank
        self._size = size
        self._timeout = timeout
        self._gloo: Any = dist.ProcessGroupGloo(PrefixStore("gloo/", store), rank, size, timeout=timeout)
        kind = dist.ProcessGroup.BackendType.GLOO
        self._register_backend(torch.device("cpu"), kind, self._gloo)
        self._set_default_backend(kind)
        self._channel = share_channel(StoreGroup(store, rank, size, timeout), timeout)
        self._order = InOrder()
        self._submitted = 0
        self._failure: PeerLost | None = None
        self._coalesced: DureWork | None = None
        if not _alive:
            atexit.register(_close_all)
        _alive.add(self)

    @property
    def options(self) -> Any:
        """Of Gloo inside; torch writes the group's name and ranks there."""
        return self._gloo.options

    @property
    def shares_memory(self) -> bool:
        """Whether collectives go through shared memory; else through Gloo."""
        return self._channel is not None

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """See torch."""
        return "dure"

    def set_timeout(self, timeout: timedelta) -> None:
        """For operations from now on."""
        self._timeout = timeout
        super().set_timeout(timeout)

    def _get_sequence_number_for_group(self) -> int:
        """Collectives that this rank has called, whoever does them; torch's tools compare it over ranks."""
        return int(self._gloo._get_sequence_number_for_group()) + self._submitted

    # Through shared memory.

    def allreduce(
        self, tensors: Tensors | torch.Tensor, opts: Any = None, timeout: Any = None, **more: Any
    ) -> Work:
        """See torch."""
        tensors, opts = several(tensors), options_of(_c10d.AllreduceOptions, opts, timeout, more)
        if not self._can(tensors):
            return self._average_by_gloo(tensors, opts)
        return self._reduce(tensors, tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        """See torch."""
        opts = opts or _c10d.AllreduceCoalescedOptions()
        if not self._can(tensors):
            return self._gloo.allreduce_coalesced(list(tensors), opts)
        return self._reduce(tensors, tensors, opts)

    def reduce(
        self, tensors: Tensors | torch.Tensor, opts: Any = None, timeout: Any = None, **more: Any
    ) -> Work:
        """See torch."""
        tensors, opts = several(tensors), options_of(_c10d.ReduceOptions, opts, timeout, more)
        if not self._can(tensors):
            return self._gloo.reduce(list(tensors), opts)
        return self._reduce(tensors, tensors, opts, root=opts.rootRank)

    def broadcast(
        self, tensors: Tensors | torch.Tensor, opts: Any = None, timeout: Any = None, **more: Any
    ) -> Work:
        """See torch."""
        tensors, opts = several(tensors), options_of(_c10d.BroadcastOptions, opts, timeout, more)
        if not self._can(tensors):
            return self._gloo.broadcast(list(tensors), opts)
        (tensor,) = tensors
        root = opts.rootRank

        def task() -> None:
            elements = flat(tensor.detach())
            self._run(Collective(BROADCAST, elements, [elements], elements.nbytes, root=root), opts)
            if root != self._own:
                put_back(elements, tensor)

        return self._submit(tensors, task, opts)

    def allgather(
        self, output_tensors: Sequence[Any], input_tensors: Any, opts: Any = None, timeout: Any = None
    ) -> Work:
        """See torch."""
        if isinstance(input_tensors, torch.Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        opts = options_of(_c10d.AllgatherOptions, opts, timeout, {})
        if not self._can([*input_tensors, *(out for outs in output_tensors for out in outs)]):
            return self._gloo.allgather([list(outs) for outs in output_tensors], list(input_tensors), opts)
        pairs = list(zip(output_tensors, input_tensors, strict=True))
        for outs, given in pairs:
            refuse_other_sizes(outs, given, self._size)
        return self._gather(pairs, opts)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Work:
        """See torch."""
        return self.all_gather_single_coalesced([output], [given], opts)

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [given], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """See torch."""
        opts = opts or _c10d.AllgatherOptions()
        if not self._can([*outputs, *inputs]):
            works = [
                self._gloo._allgather_base(out, given, opts)
                for out, given in zip(outputs, inputs, strict=True)
            ]
            return self._after(works, outputs, opts)
        pairs = []
        for out, given in zip(outputs, inputs, strict=True):
            refuse_other_size(out, given, self._size)
            pairs.append((parts_of(out, self._size), given))
        return self._gather(pairs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(
        self,
        output_tensors: Any,
        input_tensors: Sequence[Any],
        opts: Any = None,
        timeout: Any = None,
        **more: Any,
    ) -> Work:
        """See torch."""
        if isinstance(output_tensors, torch.Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        opts = options_of(_c10d.ReduceScatterOptions, opts, timeout, more)
        if not self._can([*output_tensors, *(given for parts in input_tensors for given in parts)]):
            return self._gloo.reduce_scatter(
                list(output_tensors), [list(parts) for parts in input_tensors], opts
            )
        joined = []
        for out, parts in zip(output_tensors, input_tensors, strict=True):
            refuse_other_sizes(parts, out, self._size)
            joined.append(torch.cat([part.detach().reshape(-1) for part in parts]))
        return self._scatter(output_tensors, joined, opts)

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Work:
        """See torch."""
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def _reduce_scatter_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """See torch."""
        opts = opts or _c10d.ReduceScatterOptions()
        if not self._can([*outputs, *inputs]):
            pairs = zip(outputs, inputs, strict=True)
            works = [self._gloo._reduce_scatter_base(out, given, opts) for out, given in pairs]
            return self._after(works, outputs, opts)
        for out, given in zip(outputs, inputs, strict=True):
            refuse_other_size(given, out, self._size)
        return self._scatter(outputs, inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:
        """See torch."""
        opts = options_of(_c10d.BarrierOptions, opts, timeout, {})
        if self._channel is None:
            return self._gloo.barrier(opts)
        return self._submit([], lambda: self._run(Collective(BARRIER, None, [], 0), opts), opts)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = None

    def _end_coalescing(self, device: torch.device) -> Work:
        # All before the last are over when it is.
        work, self._coalesced = self._coalesced, None
        return work if work is not None else _finished([])

    def shutdown(self) -> None:
        """Leave; a collective that still waits for other ranks fails."""
        if os.getpid() != self._pid:
            return
        self._order.close()
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        self._failure = self._failure or PeerLost("the process group is destroyed")

    def abort(self) -> None:
        """As `shutdown`."""
        self.shutdown()
        self._gloo.abort()

    def close_at_exit(self) -> None:
        """Nobody destroyed the group: end its thread while the interpreter is whole."""
        if os.getpid() == self._pid:
            self._order.close()

    # How.

    def _can(self, tensors: Tensors) -> bool:
        """Whether these go through shared memory; else Gloo says what is wrong with them, or does it."""
        self._refuse_fork()
        if self._failure is not None:
            raise self._failure
        return self._channel is not None and all(
            tensor.layout == torch.strided and is_host(tensor.device) for tensor in tensors
        )

    def _refuse_fork(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                f"process {os.getpid()} was forked from rank {self._own}, and uses its process group; only the rank "
                "itself can"
            )

    def _submit(
        self, tensors: Tensors, task: Callable[[], None], opts: Any, *, is_gloos: bool = False
    ) -> Work:
        """`is_gloos`: it only waits for what Gloo does, and counts."""
        self._refuse_fork()
        self._submitted += not is_gloos
        waits = not getattr(opts, "asyncOp", True)
        work = self._order.submit(DureWork(tensors), task, waits=waits)
        self._coalesced = work
        return work

    def _run(self, call: Collective, opts: Any) -> None:
        if self._failure is not None:
            raise self._failure
        given = opts.timeout.total_seconds() if opts.timeout is not None else 0.0
        seconds = given if given > 0 else self._timeout.total_seconds()
        channel = self._channel
        if channel is None:
            raise PeerLost("the process group is destroyed")
        try:
            channel.run(call, seconds, self._order.look)
        except UsageError:  # noticed by all ranks alike: they can go on
            raise
        except BaseException as failure:
            # This rank has left in the middle: nothing later can be right.
            self._failure = PeerLost(f"an earlier collective of this process group failed: {failure}")
            raise

    def _reduce(self, tensors: Tensors, outs: Tensors, opts: Any, root: int = -1) -> Work:
        name = op_name(opts.reduceOp)
        for tensor in tensors:
            combinable(tensor[:0] if tensor.dim() else tensor, name)  # refused here rather than in a thread

        def task() -> None:
            for tensor, out in zip(tensors, outs, strict=True):
                elements, op = combinable(tensor, name)
                kind = REDUCE_DIRECT if elements.nbytes <= DIRECT_BYTES else ALL_REDUCE
                into = elements if root in (-1, self._own) else elements.new_empty(0)
                dtype = DTYPES[elements.dtype]
                self._run(Collective(kind, elements, [into], elements.nbytes, op, root, dtype), opts)
                if root in (-1, self._own):
                    put_back(elements, out)

        return self._submit(outs, task, opts)

    def _gather(self, pairs: Sequence[tuple[Tensors, torch.Tensor]], opts: Any) -> Work:
        def task() -> None:
            for outs, given in pairs:
                elements = flat(given.detach())
                into = [out if out.is_contiguous() else torch.empty_like(out).contiguous() for out in outs]
                self._run(Collective(ALL_GATHER, elements, into, elements.nbytes), opts)
                for result, out in zip(into, outs, strict=True):
                    put_back(result, out)

        return self._submit([out for outs, _ in pairs for out in outs], task, opts)

    def _scatter(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Work:
        name = op_name(opts.reduceOp)
        for given in inputs:
            combinable(given[:0] if given.dim() else given, name)

        def task() -> None:
            for out, given in zip(outputs, inputs, strict=True):
                elements, op = combinable(given, name)
                into, _ = combinable(out, name)
                dtype = DTYPES[elements.dtype]
                self._run(Collective(REDUCE_SCATTER, elements, [into], into.nbytes, op, dtype=dtype), opts)
                put_back(into, out)

        return self._submit(outputs, task, opts)

    def _average_by_gloo(self, tensors: Tensors, opts: Any) -> Work:
        """Gloo's all-reduce; it has no AVG."""
        if op_name(opts.reduceOp) != "AVG":
            return self._gloo.allreduce(list(tensors), opts)
        opts.reduceOp = dist.ReduceOp.SUM
        work = self._gloo.allreduce(list(tensors), opts)

        def task() -> None:
            work.wait()
            with torch.no_grad():
                for tensor in tensors:
                    tensor.copy_(tensor / self._size)

        return self._submit(tensors, task, opts, is_gloos=True)

    def _after(self, works: Sequence[Work], tensors: Tensors, opts: Any) -> Work:
        if len(works) == 1:
            return works[0]

        def task() -> None:
            for work in works:
                work.wait()

        return self._submit(tensors, task, opts, is_gloos=True)


eager_only(ProcessGroupDure, DureWork, InOrder)


def _close_all() -> None:
    for group in list(_alive):
        group.close_at_exit()


def _finished(tensors: Tensors) -> DureWork:
    work = DureWork(tensors)
    work.run(lambda: None)
    return work
