"""The compiled kernel and the torch calls that stand in for it give the same bits."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.comm.reduce import treesum
from dure.comm.reduce.exchanger import Pieces, Wire, joined, largest
from dure.comm.reduce.treesum import BLOCK, tree_sum

needs_kernel = pytest.mark.skipif(
    treesum.compiled() is None, reason="dure was installed without a C compiler: no compiled kernel"
)
LARGEST = torch.finfo(torch.float32).max
ODD = torch.tensor(
    [0.0, -0.0, 1e-45, -1e-40, 3.4e38, -3.4e38, torch.inf, -torch.inf, 1.0, 2.0**-126, 65535.5]
)


def summed(pieces, leaves, scale, wire, *, kernel, monkeypatch):
    if not kernel:
        monkeypatch.setattr(treesum, "compiled", lambda: None)
    additions, _, (root,) = joined([range(at, at + 1) for at in range(leaves)], leaves)
    outs = [torch.full_like(pieces[0], 7.0) for _ in range(2)]
    before = [piece.clone() for piece in pieces]
    finite = tree_sum(pieces, additions, root, outs, wire, LARGEST)(scale)
    monkeypatch.undo()
    assert all(torch.equal(*pair) for pair in zip(pieces, before, strict=True)), "it wrote to its pieces"
    assert outs[0].numpy().tobytes() == outs[1].numpy().tobytes()
    assert finite == bool(outs[0].isfinite().all())
    return outs[0]


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("leaves", range(1, 9))
@pytest.mark.parametrize("numel", [1, 3, 1023, 1024, 1025, BLOCK - 1, BLOCK + 1, 3 * BLOCK + 5])
def test_the_kernel_gives_torchs_bits(numel, leaves, dtype, monkeypatch):
    generator = torch.Generator().manual_seed(numel * leaves)
    pieces = [torch.randn(numel, generator=generator) * 10.0 ** (at - 3) for at in range(leaves)]
    found = [
        summed(pieces, leaves, 1 / 3, Wire(dtype), kernel=kernel, monkeypatch=monkeypatch)
        for kernel in (True, False)
    ]
    assert torch.equal(*found)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_extreme_numbers_too(dtype, monkeypatch):
    pairs = torch.tensor(list(itertools.product(ODD.tolist(), repeat=2)))
    pieces = [pairs[:, 0].contiguous(), pairs[:, 1].contiguous()]
    found = [
        summed(pieces, 2, 0.5, Wire(dtype), kernel=kernel, monkeypatch=monkeypatch)
        for kernel in (True, False)
    ]
    assert torch.equal(found[0].isnan(), found[1].isnan())
    there = ~found[0].isnan()
    assert found[0][there].numpy().tobytes() == found[1][there].numpy().tobytes()


@needs_kernel
@settings(max_examples=200, deadline=None)
@given(st.integers(1, 16), st.integers(1, 8), st.data())
def test_any_shape_of_a_step_gives_torchs_bits(shards, ranks, data):
    ranks = min(ranks, shards)
    active = data.draw(st.integers(1, shards))
    shape = Pieces.of_step(ranks, shards, active)
    numel = data.draw(st.integers(1, 3000))
    generator = torch.Generator().manual_seed(numel)
    pieces = [torch.randn(numel, generator=generator) for _ in shape.in_order]
    additions, _, (root,) = joined(shape.in_order, shape.leaves)
    outs = [torch.empty(numel) for _ in range(2)]
    tree_sum(pieces, additions, root, outs[:1], Wire(), LARGEST)(1 / active)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(treesum, "compiled", lambda: None)
        tree_sum(pieces, additions, root, outs[1:], Wire(), LARGEST)(1 / active)
    assert torch.equal(*outs)


def test_outs_may_be_the_pieces_themselves():
    pieces = [torch.full((2000,), float(at)) for at in range(4)]
    additions, _, (root,) = joined([range(at, at + 1) for at in range(4)], 4)
    tree_sum(pieces, additions, root, pieces, Wire(), LARGEST)(0.25)
    assert all(bool((piece == 1.5).all()) for piece in pieces)


@needs_kernel
@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "torch"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_sum_that_its_own_type_cannot_hold_is_not_finite(dtype, kernel, monkeypatch):
    if not kernel:
        monkeypatch.setattr(treesum, "compiled", lambda: None)
    piece = torch.zeros(3 * BLOCK + 5)
    summing = tree_sum([piece], [], 0, [torch.empty_like(piece)], Wire(), largest(dtype))
    assert summing(1.0)
    for value in (torch.inf, -torch.inf, torch.nan, torch.finfo(dtype).max, -torch.finfo(dtype).max, 70000.0):
        for place in (0, 1023, 1024, BLOCK, len(piece) - 1):
            piece.zero_()
            piece[place] = value
            assert summing(1.0) == bool(piece.to(dtype).isfinite().all()), (value, place)
