"""Losses as sums with counts, in both of the layouts that people use."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dure.base.errors import ModelRefused
from dure.comm.topology import read_topology
from dure.step.forward import Setting, compute_loss, forward
from dure.step.loss import accuracy, as_sum, classes_to_end, cross_entropy, full_precision, mse

DICE = torch.Generator().manual_seed(1)


def test_classes_may_be_the_second_dimension_or_the_last():
    output = torch.randn(4, 3, 5, 5, generator=DICE)
    target = torch.randint(0, 3, (4, 5, 5), generator=DICE)
    target[0, 0, 0] = -100
    wanted = F.cross_entropy(output, target, reduction="sum")
    assert torch.equal(cross_entropy(output, target)[0], wanted)
    assert torch.allclose(cross_entropy(output.movedim(1, -1), target)[0], wanted)
    assert accuracy(output, target) == accuracy(output.movedim(1, -1), target)
    assert accuracy(output, target)[1] == 99


def test_an_output_that_fits_both_layouts_is_refused():
    output = torch.randn(4, 5, 5, generator=DICE)
    target = torch.randint(0, 5, (4, 5), generator=DICE)
    for measure in (cross_entropy, accuracy):
        with pytest.raises(ModelRefused, match="second dimension or the last"):
            measure(output, target)


def test_under_autocast_the_loss_is_that_of_the_outputs_in_full_precision():
    """Of bf16 sums 3616 came instead of 3638.3."""
    torch.manual_seed(3)
    module, points = nn.Linear(8, 10), torch.randn(1500, 8)
    classes = torch.randint(0, 10, (1500,))
    setting = Setting(read_topology({}), 8, 0, True, torch.device("cpu"), "bf16")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = module(points)
    assert low.dtype is torch.bfloat16
    for named, torchs, target in (
        (cross_entropy, F.cross_entropy, classes),
        (mse, F.mse_loss, torch.zeros(1500, 10)),
        (as_sum(lambda output, _: output.abs()), lambda output, _, reduction: output.abs().sum(), classes),
    ):
        wanted = torchs(low.float(), target, reduction="sum")
        total, _ = compute_loss(module, (points, target), named, setting)
        assert total.dtype is torch.float32
        assert torch.equal(total, wanted)
        # An evaluation judges the same outputs.
        assert torch.equal(named(forward(module, points, setting), target)[0], wanted)


def test_losses_of_low_precision_models_are_summed_in_fp32():
    output = torch.full((3000,), 1.0, dtype=torch.bfloat16)
    assert as_sum(lambda output, _: output)(output, None)[0] == 3000.0
    assert mse(output, torch.zeros_like(output))[0] == 3000.0


def test_outputs_of_any_form_come_in_full_precision_and_keep_their_form():
    low = torch.ones(2, dtype=torch.bfloat16)
    found = full_precision(
        {"logits": low, "more": [low, (low, None)], "ids": torch.ones(2, dtype=torch.int64)}
    )
    assert found["logits"].dtype is found["more"][0].dtype is found["more"][1][0].dtype is torch.float32
    assert isinstance(found["more"][1], tuple)
    assert found["ids"].dtype is torch.int64
    whole = {"logits": low.float(), "more": (low.float(),)}
    assert full_precision(whole) is whole


class Operators(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def test_classes_second_take_a_deterministic_kernel_on_accelerators():
    """nll_loss2d has none on CUDA; the device meta stands for what is no CPU."""
    output = torch.empty(4, 3, 5, 5, device="meta", requires_grad=True)
    target = torch.empty(4, 5, 5, dtype=torch.int64, device="meta")
    with Operators() as called:
        flat, classes = classes_to_end(output, target)
        F.cross_entropy(flat, classes, reduction="sum").backward()
    assert not any("nll_loss2d" in name for name in called.names)
    with Operators() as called:
        _, count = cross_entropy(output, target)
    assert isinstance(count, torch.Tensor)  # nobody waits for its value
    assert any("nll_loss_forward" in name for name in called.names)
    assert not any("nll_loss2d" in name for name in called.names)


def test_classes_at_the_end_give_the_same_loss_and_gradients():
    output = torch.randn(4, 3, 5, 2, generator=DICE, dtype=torch.float64)
    target = torch.randint(0, 3, (4, 5, 2), generator=DICE)
    target[0, 0, 0] = -100
    probabilities = torch.softmax(torch.randn(4, 3, 5, 2, generator=DICE, dtype=torch.float64), 1)
    for wanted in (target, probabilities):
        one, other = output.clone().requires_grad_(), output.clone().requires_grad_()
        F.cross_entropy(one, wanted, reduction="sum").backward()
        F.cross_entropy(*classes_to_end(other, wanted), reduction="sum").backward()
        torch.testing.assert_close(one.grad, other.grad)
