"""Proofs: that replicas are the same bits, or, without synchronisation, how far apart they are."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence

import torch

from dure.base.errors import ReplicasDiffer
from dure.comm.group import Group
from dure.device.fingerprint import fingerprint, named_weights, optimizer_tensors
from dure.observe.results import Apart
from dure.proof.proof_cadence import ProofCadence, ProofCost

_COST = "cost"


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
    cadence: ProofCadence | None = None,
) -> list[str]:
    """One fingerprint per rank, all the same, or an error that names the ranks and the first tensor that differ.

    `sharing` are the ranks that hold a sharded optimizer together: the state of all their parts counts as
    one, to be compared with what other nodes hold. `cadence` is told what the proof costs.
    """
    began = time.thread_time()
    own = fingerprints_of(module, optimizer)
    hashing, asked = time.thread_time() - began, time.perf_counter()
    parts = list(own)
    if sharing is not None:
        own["optimizer state"] = "-".join(sharing.gather(own["optimizer state"], "comparing fingerprints"))
    told = own if cadence is None else {**own, _COST: cadence.cost(hashing, step + 1).as_text()}
    everyones = [json.loads(text) for text in group.gather(json.dumps(told), "comparing fingerprints")]
    if cadence is not None:
        costs = [ProofCost.from_text(other.pop(_COST)) for other in everyones]
        cadence.proved(costs, time.perf_counter() - asked, step + 1)
    for part in parts:
        if len({other[part] for other in everyones}) > 1:
            state = _state(module, optimizer if sharing is None else None)
            raise ReplicasDiffer(who_differs(state, group, step, part))
    return [whole_fingerprint(other) for other in everyones]


def _state(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> list[tuple[str, torch.Tensor]]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if optimizer is not None:
        tensors += [
            (f"the optimizer's state {name}", tensor) for name, tensor in optimizer_tensors(optimizer)
        ]
    return tensors


def who_differs(tensors: Sequence[tuple[str, torch.Tensor]], group: Group, step: int, part: str) -> str:
    """Which ranks hold other bits than most, and the first tensor that shows it. A collective call."""
    own = [fingerprint([("", tensor)]) for _, tensor in tensors]
    told = [json.loads(text) for text in group.gather(json.dumps(own), "finding what differs")]
    columns = [[each[at] for each in told] for at in range(len(own))]
    differing = [at for at, seen in enumerate(columns) if len(set(seen)) > 1]
    why = "something outside of the step wrote to a replica, or a machine computes or remembers wrongly"
    if not differing:
        return f"after step {step} the {part} is not the same on all nodes; {why}"
    first = differing[0]
    votes = Counter(columns[first]).most_common()
    name = tensors[first][0]
    more = f" ({len(differing)} of {len(own)} tensors differ)" if len(differing) > 1 else ""
    if len(votes) > 1 and votes[0][1] == votes[1][1]:
        kinds = [[str(r) for r, bits in enumerate(columns[first]) if bits == vote] for vote, _ in votes]
        sides = " and ".join(f"rank(s) {', '.join(ranks)}" for ranks in kinds)
        return f"after step {step} {sides} hold other bits of {name}{more}, and no majority says which is right; {why}"
    odd = [str(rank) for rank, bits in enumerate(columns[first]) if bits != votes[0][0]]
    return f"after step {step} rank(s) {', '.join(odd)} hold other bits of {name} than the other ranks{more}; {why}"


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
