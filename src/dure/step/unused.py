"""Parameters that a shard does not use: found after its backward pass, and completed so that DDP goes on.

DDP waits for a gradient of every parameter. Its own way out (`find_unused_parameters`) walks the graph at every step,
meets once more per step, and must be chosen beforehand. Here the graph is walked only when gradients are missing, and
those are then given to DDP by a backward pass of their own, which adds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.autograd.graph import Node

from dure.base.errors import UsageError


def not_reached(total: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> set[int]:
    """The positions of parameters that a loss does not depend on; its backward pass may be over."""
    # Only a node that accumulates a leaf's gradient has a variable.
    reached = {id(getattr(node, "variable", None)) for node in graph_of(total)}
    return {at for at, parameter in enumerate(parameters) if id(parameter) not in reached}


def graph_of(total: torch.Tensor) -> Iterator[Node]:
    """The nodes of the graph that computed a tensor."""
    seen: set[Node] = set()
    ahead = [total.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            ahead.extend(before for before, _ in node.next_functions)
            yield node


def refuse_frozen(parameters: Sequence[torch.nn.Parameter], missing: set[int]) -> None:
    """Raise UsageError where a parameter has no gradient because it was frozen meanwhile."""
    frozen = next((at for at in sorted(missing) if not parameters[at].requires_grad), None)
    if frozen is not None:
        raise UsageError(
            f"parameter {frozen} (shape {tuple(parameters[frozen].shape)}) was frozen after team.replicate; freeze it "
            "before, or replicate the module again"
        )


def complete(parameters: Sequence[torch.nn.Parameter], missing: set[int]) -> set[int]:
    """Run a backward pass that reaches the missing parameters alone. Returns those that had no gradient at all."""
    without = {at for at in missing if parameters[at].grad is None}
    refuse_frozen(parameters, missing)
    # A gradient from an earlier micro-batch stays as it is: x + -0.0 is x for every x, also for -0.0.
    nothing = {at: torch.tensor(0.0 if at in without else -0.0) for at in missing}
    order = sorted(missing)
    torch.autograd.backward(
        [parameters[at] for at in order],
        [
            nothing[at].to(dtype=parameters[at].dtype, device=parameters[at].device).expand_as(parameters[at])
            for at in order
        ],
    )
    return without
