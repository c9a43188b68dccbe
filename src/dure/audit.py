"""Proofs: that replicas are the same bits, or, without synchronisation, how far apart they are."""

from __future__ import annotations

import json

import torch

from dure.errors import ReplicasDiffer
from dure.exchange.group import Group
from dure.fingerprint import fingerprint, named_weights, optimizer_tensors
from dure.results import Apart


def fingerprints_of(module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, str]:
    """Of each part of a replica's state: parameters, buffers, optimizer."""
    parameters = dict(module.named_parameters())
    found = {
        "parameters": fingerprint((n, t) for n, t in named_weights(module) if n in parameters),
        "buffers": fingerprint((n, t) for n, t in named_weights(module) if n not in parameters),
    }
    if optimizer is not None:
        found["optimizer state"] = fingerprint(optimizer_tensors(optimizer))
    return found


def prove_same(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    group: Group,
    step: int,
    sharing: Group | None = None,
) -> list[str]:
    """One fingerprint a rank, all the same, or an error that names the ranks and parts that differ.

    `sharing` are the ranks that hold a sharded optimizer together: the state of all their parts counts as
    one, to be compared with what other nodes hold.
    """
    own = fingerprints_of(module, optimizer)
    if sharing is not None:
        own["optimizer state"] = "-".join(sharing.gather(own["optimizer state"], "comparing fingerprints"))
    everyones = [json.loads(text) for text in group.gather(json.dumps(own), "comparing fingerprints")]
    for part in own:
        odd = [str(rank) for rank, other in enumerate(everyones) if other[part] != everyones[0][part]]
        if odd:
            raise ReplicasDiffer(
                f"after step {step} the {part} of rank(s) {', '.join(odd)} are not the bits of rank 0's; something "
                "outside of the step wrote to a replica, or a machine computes wrongly"
            )
    return [whole_fingerprint(other) for other in everyones]


def whole_fingerprint(parts: dict[str, str]) -> str:
    """One fingerprint of all parts."""
    joined = torch.frombuffer(bytearray(json.dumps(parts, sort_keys=True).encode()), dtype=torch.uint8)
    return fingerprint([("state", joined)])


def how_far_apart(module: torch.nn.Module, group: Group) -> Apart:
    """Compare all ranks' parameters, weight by weight."""
    largest, squares, count = 0.0, 0.0, 0
    for _, parameter in sorted(module.named_parameters()):
        high, low = parameter.detach().cpu().clone(), parameter.detach().cpu().clone()
        group.extreme(high, "measuring how far apart ranks are", largest=True)
        group.extreme(low, "measuring how far apart ranks are", largest=False)
        gap = (high - low).double()
        largest = max(largest, float(gap.max()))
        squares += float(gap.square().sum())
        count += gap.numel()
    return Apart(largest, (squares / max(count, 1)) ** 0.5)
