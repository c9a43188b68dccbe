"""What the backend leaves to the Gloo group inside it.

Every method is defined here, as torch's C++ looks for it in Python first: the base class's own would hold the GIL while
it waits, and ranks whose threads need it would wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dure.comm.backend.arguments import Tensors, options_of

_c10d: Any = dist.distributed_c10d
"""Has the options' classes, which torch.distributed does not export."""


class ByGloo:
    """Collectives between ranks that Gloo does; `dist.ProcessGroup` has the same names."""

    _gloo: Any
    _timeout: timedelta

    def all_to_all_single(
        self, output: Any, given: Any, output_split_sizes: Any, input_split_sizes: Any, opts: Any = None
    ) -> Any:
        """See torch."""
        opts = opts or _c10d.AllToAllOptions()
        return self._gloo.alltoall_base(output, given, output_split_sizes, input_split_sizes, opts)

    alltoall_base = all_to_all_single

    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None) -> Any:
        """See torch."""
        return self._gloo.alltoall(list(output_tensors), list(input_tensors), opts or _c10d.AllToAllOptions())

    def gather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None, **more: Any
    ) -> Any:
        """See torch."""
        if isinstance(input_tensors, torch.Tensor):  # torch's short form: one list, one tensor, a root
            output_tensors, input_tensors = [output_tensors] if output_tensors else [], [input_tensors]
        opts = options_of(_c10d.GatherOptions, opts, timeout, more)
        return self._gloo.gather([list(outs) for outs in output_tensors], list(input_tensors), opts)

    def scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None, **more: Any
    ) -> Any:
        """See torch."""
        if isinstance(output_tensors, torch.Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors] if input_tensors else []
        opts = options_of(_c10d.ScatterOptions, opts, timeout, more)
        return self._gloo.scatter(list(output_tensors), [list(given) for given in input_tensors], opts)

    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], input_list: Tensors, opts: Any = None
    ) -> Any:
        """See torch."""
        outputs = [list(tensors) for tensors in output_lists]
        return self._gloo.allgather_coalesced(outputs, list(input_list), opts or _c10d.AllgatherOptions())

    def send(self, tensors: Tensors, dstRank: int, tag: int) -> Any:  # noqa: N803 - torch's names
        """See torch."""
        return self._gloo.send(list(tensors), dstRank, tag)

    def recv(self, tensors: Tensors, srcRank: int, tag: int) -> Any:  # noqa: N803
        """See torch."""
        return self._gloo.recv(list(tensors), srcRank, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Any:
        """See torch."""
        return self._gloo.recv_anysource(list(tensors), tag)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """See torch; names the ranks that have not come."""
        self._gloo.monitored_barrier(timeout or self._timeout, wait_all_ranks)
