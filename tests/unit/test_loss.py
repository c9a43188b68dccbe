"""Losses as sums with counts, in both of the layouts that people use."""

import pytest
import torch
import torch.nn.functional as F

from dure.base.errors import ModelRefused
from dure.step.loss import accuracy, cross_entropy

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
