"""What the start-up probe and the buffers refuse, by name; no processes."""

import pytest
import torch
from torch import nn

from dure.errors import ModelRefused
from dure.fingerprint import weights_sha256
from dure.replica import Buffers, probe, refuse_what_cannot_be_exact

POINTS = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def probed(module, *others):
    others = others or (POINTS + 1,)
    return probe(
        module,
        lambda: module(POINTS).sum(),
        [lambda points=points: module(points).sum() for points in others],
    )


class Teacher(nn.Module):
    """Keeps a running mean of its weights in frozen parameters that start as the same bits."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 2), nn.Linear(6, 2).requires_grad_(False)
        self.teacher.load_state_dict(self.student.state_dict())

    def forward(self, points):
        with torch.no_grad():
            self.teacher.weight.mul_(0.5).add_(self.student.weight, alpha=0.5)
        return self.student(points)


def test_a_parameter_written_in_the_forward_pass_is_refused_even_if_its_bits_stay():
    module = Teacher()
    before = weights_sha256(module)
    module(POINTS)
    assert weights_sha256(module) == before
    with pytest.raises(ModelRefused, match=r"teacher\.weight"):
        probed(module)


def test_complex_parameters_are_refused_by_name():
    module = nn.Module()
    module.register_parameter("phase", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    with pytest.raises(ModelRefused, match="phase is complex"):
        refuse_what_cannot_be_exact(module)


class Branches(nn.Module):
    """Which part is used, and which buffer written, is up to the data."""

    def __init__(self):
        super().__init__()
        self.low, self.high = nn.Linear(6, 2), nn.Linear(6, 2)
        self.register_buffer("highs", torch.zeros(()))
        self.register_buffer("table", torch.ones(3))

    def forward(self, points):
        if points.mean() < 50:
            return self.low(points)
        self.highs += 1
        return self.high(points)


def test_the_probe_learns_from_all_shards_not_from_the_first_alone():
    found = probed(Branches(), POINTS, POINTS + 100)
    assert found.unused == ("high.bias", "high.weight", "low.bias", "low.weight")
    assert found.written == ("highs",)


def test_a_buffer_that_is_written_only_later_is_refused_by_name():
    module = Branches()
    found = probed(module, POINTS + 1)
    buffers = Buffers(module, found.written)
    buffers.begin()
    module(POINTS)
    buffers.settle(None)
    buffers.begin()
    module(POINTS + 100)
    with pytest.raises(ModelRefused, match="writes the buffer highs now"):
        buffers.settle(None)
