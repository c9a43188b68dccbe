"""Copies past the caches are copies: every byte, and no other."""

import random

import pytest
import torch

from dure.device import copying
from dure.device.copying import copy_into

KERNEL = pytest.param(
    True,
    marks=pytest.mark.skipif(copying._compiled() is None, reason="dure was installed without a C compiler"),
)


@pytest.mark.parametrize("kernel", [KERNEL, False])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_each_tensor_is_where_it_should_be_and_nothing_else_is_changed(kernel, dtype, monkeypatch):
    if not kernel:
        monkeypatch.setattr(copying, "_compiled", lambda: None)
    dice = random.Random(3)
    tensors, places, at = [], [], 0
    for numel in [1, 15, 16, 17, 63, 64, 65, 4095, 4096, 4097, 16384, 16385, 70_000, 0]:
        values = torch.randint(0, 200, (numel + 3,)).to(dtype)
        tensors.append(values[dice.randrange(4) :][:numel])  # sources that are not aligned
        at += dice.randrange(1, 9) * dtype.itemsize
        places.append(at)
        at += tensors[-1].nbytes
    memory = torch.full((at + 64,), 77, dtype=torch.uint8)
    wanted = memory.clone()
    for place, tensor in zip(places, tensors, strict=True):
        wanted[place : place + tensor.nbytes] = tensor.view(torch.uint8)
    copy_into(memory, places, tensors)
    assert torch.equal(memory, wanted)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="do not fit"):
        copy_into(torch.zeros(100, dtype=torch.uint8), [96], [torch.ones(2)])
