"""What the start-up probe and the buffers refuse, by name; no processes."""

import pytest
import torch
from torch import nn

from dure.base.errors import ModelRefused
from dure.comm.topology import read_topology
from dure.device.fingerprint import weights_sha256
from dure.step.forward import Setting, forward
from dure.step.replica import (
    Buffers,
    compile_by_shape_alone,
    probe,
    refuse_what_cannot_be_exact,
    refusing_what_is_not_deterministic,
)

POINTS = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def probed(module, *others):
    others = others or (POINTS + 1,)
    found, _ = probe(
        module,
        lambda: module(POINTS).sum(),
        [lambda points=points: module(points).sum() for points in others],
    )
    return found


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


def test_hooks_on_accumulated_gradients_are_refused_by_name():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    refuse_what_cannot_be_exact(module)
    module[1].weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.clamp_(-1, 1))
    with pytest.raises(ModelRefused, match=r"1\.weight has a hook .* change gradients with register_hook"):
        refuse_what_cannot_be_exact(module)


def test_compiled_parts_stay_compiled_after_the_probe():
    """A dispatch mode around compiled code makes dynamo leave that code alone for good."""
    compiled = []

    def backend(graph, _inputs):
        compiled.append(graph)
        return graph.forward

    module = nn.Sequential(torch.compile(nn.Linear(6, 4), backend=backend), nn.Linear(4, 2))
    probed(module)
    assert compiled


@pytest.fixture
def shapes_compiled():
    """A backend that notes what it is to compile, under the team's settings."""
    import torch._dynamo

    shapes = []

    def backend(graph, inputs):
        shapes.append(tuple(inputs[-1].shape))
        return graph.forward

    with torch._dynamo.config.patch(automatic_dynamic_shapes=True, fail_on_recompile_limit_hit=False):
        torch._dynamo.reset()
        compile_by_shape_alone()
        yield backend, shapes
    torch._dynamo.reset()


def test_compiled_kernels_depend_on_shapes_alone(shapes_compiled):
    backend, shapes = shapes_compiled
    model = torch.compile(lambda points: points.square(), backend=backend)
    for size in (2, 3, 5, 3, 2):
        model(torch.ones(size, 6))
    assert shapes == [(2, 6), (3, 6), (5, 6)]
    assert all(type(size) is int for shape in shapes for size in shape)


def test_more_shapes_than_may_be_compiled_are_refused_not_run_uncompiled(shapes_compiled):
    backend, shapes = shapes_compiled
    model = torch.compile(nn.Linear(6, 2), backend=backend)
    setting = Setting(read_topology({}), 8, 0, True, torch.device("cpu"))
    limit = torch._dynamo.config.recompile_limit
    for size in range(2, 2 + limit):
        forward(model, torch.ones(size, 6), setting)
    with pytest.raises(ModelRefused, match="pad the samples to fewer shapes"):
        forward(model, torch.ones(2 + limit, 6), setting)
    assert len(shapes) == limit


def test_a_collective_in_the_forward_pass_is_refused_by_name(tmp_path):
    class Meets(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 2)

        def forward(self, points):
            torch.distributed.all_reduce(points.clone())
            return self.inner(points)

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ModelRefused, match="collective"):
            probed(Meets())
    finally:
        torch.distributed.destroy_process_group()


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


class Puts(nn.Module):
    """Uses an operator that no device has a deterministic kernel for."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, points):
        return points.clone().put_(torch.tensor([0, 1]), torch.ones(2)) * self.weight


def test_an_operator_without_a_deterministic_kernel_is_refused_by_name():
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ModelRefused, match=r"the operator put_ has no deterministic kernel.*index_put_"):
            probed(Puts())
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("message", "name", "instead"),
    [
        ("adaptive_avg_pool2d_backward_cuda", "adaptive_avg_pool2d_backward_cuda", r"x\.mean"),
        ("ctc_loss_backward_gpu", "ctc_loss_backward_gpu", "log_probs"),
        ("grid_sampler_2d_backward_cuda", "grid_sampler_2d_backward_cuda", "another one"),
    ],
)
def test_what_serves_instead_is_said(message, name, instead):
    with pytest.raises(ModelRefused, match=f"{name} .*{instead}"), refusing_what_is_not_deterministic():
        raise RuntimeError(
            f"{message} does not have a deterministic implementation, but you set "
            "'torch.use_deterministic_algorithms(True)'."
        )
