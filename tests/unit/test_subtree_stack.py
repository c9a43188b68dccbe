"""A rank's shards added in tree order, also where autograd itself adds two of them: bit for bit, zeros' signs too."""

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.comm import tree
from dure.comm.reduce.subtree_stack import SubtreeStack

SIZES = (3, (2, 4), 1)


def gradients_of(seed, used):
    """Of one micro-batch, with zeros of both signs; None for parameters that it does not use."""
    dice = torch.Generator().manual_seed(seed)
    values = [torch.randn(size, generator=dice) for size in SIZES]
    for value in values:
        value.view(-1)[0] = -0.0 if seed % 2 else 0.0
    return [value if at in used else None for at, value in enumerate(values)]


def backward(parameters, gradients):
    """As a backward pass: autograd takes a gradient over, or adds to what is there."""
    pairs = [(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
    if pairs:
        torch.autograd.backward([p for p, _ in pairs], [g.clone() for _, g in pairs])


def in_tree_order(shards):
    """Plainly: zeros where a shard has no gradient, then the tree."""
    filled = [
        [torch.zeros(size) if g is None else g.clone() for size, g in zip(SIZES, own, strict=True)]
        for own in shards
    ]
    additions, (root,) = tree.join_order([range(at, at + 1) for at in range(len(filled))], len(filled))
    for left, right in additions:
        filled[left] = [one + other for one, other in zip(filled[left], filled[right], strict=True)]
    return filled[root]


def bits(tensors):
    return [tensor.numpy().view(numpy.uint32).tolist() for tensor in tensors]


@given(
    st.lists(
        st.tuples(
            st.sets(st.integers(0, 2)),
            st.integers(0, 50),
            st.integers(1, 2),
            st.sets(st.integers(0, 2)),
        ),
        min_size=1,
        max_size=9,
    )
)
def test_the_stack_adds_as_the_tree_does_whoever_adds_two_shards(shards):
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in SIZES]
    stack, unused, wanted, in_place = SubtreeStack(parameters), None, [], 0
    for at, (used, seed, parts, _) in enumerate(shards):
        micros = [gradients_of(seed + part, used) for part in range(parts)]
        wanted.append([None if m[0] is None else sum(m[1:], m[0]) for m in zip(*micros, strict=True)])
        for micro in micros:
            backward(parameters, micro)
        if at + 1 < len(shards) and stack.hold(at, len(shards), shards[at + 1][2], shards[at][3]):
            in_place += 1
            continue
        without = stack.push(at, len(shards))
        unused = without if unused is None else unused & without
        assert all(parameter.grad is None for parameter in parameters)
    (found,) = stack.take()
    assert bits(found) == bits(in_tree_order(wanted))
    assert unused == set(range(3)) - set().union(*(used for used, *_ in shards))
    if len(shards) > 1 and shards[1][2] == 1:
        assert in_place


def test_gradients_that_share_memory_are_not_taken_for_added_to():
    """They share the counter of writes too: the second would seem to be added to, and keep a zero's sign."""
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    both = torch.tensor([-0.0, 1.0, -0.0, 2.0])
    stack = SubtreeStack(parameters)
    for parameter, part in zip(parameters, (both[:2], both[2:]), strict=True):
        parameter.grad = part
    assert stack.hold(0, 2, 1)
    backward(parameters[:1], [torch.ones(2)])
    assert stack.push(1, 2) == set()
    ((one, other),) = stack.take()
    assert bits([one, other]) == bits([torch.tensor([1.0, 2.0]), torch.tensor([0.0, 2.0])])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_added_in_fp32_and_so_not_in_place(dtype):
    parameters = [torch.nn.Parameter(torch.zeros(4, dtype=dtype))]
    stack = SubtreeStack(parameters)
    for at, value in enumerate((1.0, 2.0**-12)):
        backward(parameters, [torch.full((4,), value, dtype=dtype)])
        assert not stack.hold(at, 2, 1)
        stack.push(at, 2)
    ((found,),) = stack.take()
    assert torch.equal(found, torch.full((4,), 1.0 + 2.0**-12))
