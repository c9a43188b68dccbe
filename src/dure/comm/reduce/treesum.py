"""One pass over a slice: add everyone's pieces in tree order, write the scaled root to everyone.

`treesum.c`, compiled when dure is installed, does it for fp32; where there was no compiler, and for other
dtypes, torch does it block by block. Same bits, about half the speed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial

import torch

from dure.base.compiled import compiled_function
from dure.comm.reduce.exchanger import Addition, Wire, is_finite
from dure.device.accelerator import is_host

BLOCK = 32 * 1024
"""Elements that torch adds at once: small enough that all ranks' blocks stay in a core's cache."""
MOST_PIECES = 64
"""That the compiled kernel has room for."""

TreeSum = Callable[[float], bool]
"""Called with the scale; returns whether all results are finite and fit into the gradient's type."""
Kernel = Callable[..., int]


class _Plan(ctypes.Structure):
    """As in treesum.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("pieces", "additions", "outs")),
        *((name, ctypes.c_int) for name in ("num_pieces", "num_additions", "root", "num_outs")),
        *((name, ctypes.c_int) for name in ("rounds_root", "outs_are_cold")),
        ("limit", ctypes.c_float),
    )


def tree_sum(
    pieces: Sequence[torch.Tensor],
    additions: Sequence[Addition],
    root: int,
    outs: Sequence[torch.Tensor],
    wire: Wire,
    limit: float,
    *,
    places: Sequence[range] | None = None,
    cold: bool = False,
) -> TreeSum:
    """What to do at every step with these flat tensors, all of one length; `outs` may be `pieces`.

    It only writes to `outs`, and there only to `places` (by default everywhere). Whatever can be made ready
    is made ready now. `limit`: see `BucketBuffers`. `cold`: nobody has just read what is in `outs`, so they are
    better written past the caches.
    """
    where = [range(outs[0].numel())] if places is None else places
    kernel = compiled()
    if kernel is not None and _is_plain(pieces, outs, wire) and 0 < len(pieces) <= MOST_PIECES:
        return _by_kernel(kernel, pieces, additions, root, outs, wire, limit, where, cold)
    cuts = [
        slice(at, min(at + BLOCK, place.stop))
        for place in where
        for at in range(place.start, place.stop, BLOCK)
    ]
    widest = max((cut.stop - cut.start for cut in cuts), default=0)
    scratch = [piece.new_empty(widest) for piece in pieces]
    blocks = [
        _block([p[cut] for p in pieces], [out[cut] for out in outs], scratch, additions, root, wire, limit)
        for cut in cuts
    ]

    def run(scale: float) -> bool:
        finite = True
        for block in blocks:
            finite &= block(scale)
        return finite

    return run


def compiled() -> Kernel | None:
    """The kernel that was compiled at installation; None where there is none."""
    return compiled_function(
        "dure.comm.reduce._treesum",
        "dure_tree_sum_4",
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_float,
        returns=ctypes.c_int,
    )


def _is_plain(pieces: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], wire: Wire) -> bool:
    tensors = [*pieces, *outs]
    return wire.dtype in (torch.float32, torch.bfloat16) and all(
        tensor.dtype == torch.float32 and is_host(tensor.device) and tensor.is_contiguous()
        for tensor in tensors
    )


def _by_kernel(
    kernel: Kernel,
    pieces: Sequence[torch.Tensor],
    additions: Sequence[Addition],
    root: int,
    outs: Sequence[torch.Tensor],
    wire: Wire,
    limit: float,
    places: Sequence[range],
    cold: bool,
) -> TreeSum:
    steps = [place for addition in additions for place in (addition.left, addition.right)]
    arrays = (
        (ctypes.c_void_p * len(pieces))(*(piece.data_ptr() for piece in pieces)),
        (ctypes.c_int * max(len(steps), 1))(*steps),
        (ctypes.c_void_p * len(outs))(*(out.data_ptr() for out in outs)),
    )
    rounds = wire.rounds and bool(additions) and additions[-1].at_root
    plan = _Plan(
        *(ctypes.addressof(array) for array in arrays),
        *(len(pieces), len(additions), root, len(outs), int(rounds), int(cold)),
        limit,
    )
    edges = [number for place in places for number in (place.start, len(place))]
    ranges = (ctypes.c_size_t * max(len(edges), 1))(*edges)
    plan_at, ranges_at, count = ctypes.addressof(plan), ctypes.addressof(ranges), len(places)
    alive = (plan, ranges, arrays, *pieces, *outs)  # the kernel knows only where they are

    def run(scale: float) -> bool:
        assert alive
        return kernel(plan_at, ranges_at, count, scale) == 0

    return run


def _block(
    pieces: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    scratch: Sequence[torch.Tensor],
    additions: Sequence[Addition],
    root: int,
    wire: Wire,
    limit: float,
) -> TreeSum:
    """One block, by torch; `scratch` is for all blocks."""
    at = list(pieces)
    scratch = [part[: outs[0].numel()] for part in scratch]
    calls: list[Callable[[], object]] = []
    for addition in additions:
        left, right, into = at[addition.left], at[addition.right], scratch[addition.left]
        if addition.at_root and wire.rounds:
            other = scratch[addition.right]
            calls.append(partial(into.copy_, left))
            calls.append(partial(other.copy_, right))
            calls.append(partial(wire.add, into, other, at_root=True))
        else:
            calls.append(partial(torch.add, left, right, out=into))
        at[addition.left] = into
    if not additions:
        calls.append(partial(scratch[root].copy_, pieces[root]))
        at[root] = scratch[root]
    whole, mul = at[root], torch.mul

    def run(scale: float) -> bool:
        for call in calls:
            call()
        for out in outs:
            mul(whole, scale, out=out)
        return is_finite(outs[0], limit)

    return run
