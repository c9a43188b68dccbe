"""The shadow shard: in some steps another rank computes one shard again, and the gradients' bits are compared.

What is compared are the gradients as their owner computed them, before anything was added to them: a wrong one goes
into the mean that all replicas share, so no comparison of replicas can see it. Both computations start from the same
state (weights, the step's first buffers, random numbers by step, micro-batch and shard) and read the samples
themselves. On a difference all ranks compute the shard again, and the majority decides who was wrong.
"""

from __future__ import annotations

import json
import socket
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

import torch
import xxhash

from dure.base.errors import ComputedWrongly
from dure.comm.group import Group
from dure.data.seeds import generators_kept, seed_of
from dure.data.shards import rank_of_shard
from dure.device.fingerprint import raw_bytes

OnCorruption = Literal["stop", "exclude", "repeat"]
"""What follows when a rank computed wrongly, after the step was repeated: the run ends (exit code 3), or goes on
without that rank, or with it."""
_BESIDE = ("the samples", "the loss")
"""What is compared besides gradients, and before them."""
_WHAT = "comparing gradients"
_LIKELY = 1 << 63


@dataclass(frozen=True)
class Chosen:
    """What is computed again in a step."""

    step: int
    shard: int
    owner: int
    by: int
    """The other rank that computes it; the same one in a team of one."""


def chosen(
    seed: int, share: float, step: int, number: int, active: int, ranks: int, shards: int
) -> Chosen | None:
    """The same on all ranks: drawn from the seed, the step and the number of the loss. None: nothing, in this step."""
    if seed_of(seed, "audit", step, number) >= share * _LIKELY:
        return None
    shard = seed_of(seed, "audited shard", step, number) % active
    owner = rank_of_shard(shard, ranks, shards)
    others = [rank for rank in range(ranks) if rank != owner] or [owner]
    return Chosen(step, shard, owner, others[seed_of(seed, "auditor", step, number) % len(others)])


@dataclass
class Computed:
    """One shard as one rank computed it once."""

    content: int
    """Hash of what its samples contain."""
    loss: float
    gradients: list[torch.Tensor]

    def digests(self) -> list[int]:
        """One per thing that is compared."""
        loss = int.from_bytes(struct.pack("<d", self.loss), "little")
        return [self.content, loss, *(xxhash.xxh3_64_intdigest(raw_bytes(one)) for one in self.gradients)]


class OwnShard:
    """Keeps the gradients of this rank's shard that is computed again elsewhere, from before they meet others."""

    def __init__(self, shard: int, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._shard = shard
        self._parameters = list(parameters)
        self._place = {id(parameter): at for at, parameter in enumerate(self._parameters)}
        self._found: dict[int, torch.Tensor] = {}

    def wants(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """All."""
        return list(range(len(parameters)))

    def note(
        self, shard: int, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Take a copy of some of a shard's gradients, if it is that shard; None stands for zeros."""
        if shard != self._shard:
            return
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                self._found[self._place[id(parameter)]] = gradient.detach().clone()

    def gradients(self) -> list[torch.Tensor]:
        """All of them, in the order of the parameters."""
        return [
            self._found[at] if at in self._found else torch.zeros_like(parameter)
            for at, parameter in enumerate(self._parameters)
        ]


@dataclass(frozen=True)
class Told:
    """What one rank tells when two have computed different bits."""

    host: str
    digests: list[list[int]]
    """Of each of its computations: in the step or beside it, where it was asked to, and once more."""


@dataclass(frozen=True)
class Verdict:
    """Who is right, by the majority of ranks."""

    right: list[int] | None = None
    """The digests that most ranks agree on; None where no two do, or as many agree on others."""
    wrong: list[int] = field(default_factory=list)
    """Ranks that have computed something else at least once."""
    unsteady: list[int] = field(default_factory=list)
    """Ranks whose own computations differ."""


def judge(told: Sequence[Told]) -> Verdict:
    """Decide. A rank has one voice for each result that it came to; alone, each computation has one."""
    unsteady = [rank for rank, one in enumerate(told) if len(set(map(tuple, one.digests))) > 1]
    if len(told) == 1:
        votes = Counter(map(tuple, told[0].digests))
    else:
        votes = Counter(result for one in told for result in set(map(tuple, one.digests)))
    ranked = votes.most_common(2)
    if ranked[0][1] < 2 or (len(ranked) > 1 and ranked[0][1] == ranked[1][1]):
        return Verdict(unsteady=unsteady)
    right = list(ranked[0][0])
    wrong = [rank for rank, one in enumerate(told) if any(result != right for result in one.digests)]
    return Verdict(right, wrong, unsteady)


@dataclass(frozen=True)
class Corruption:
    """Two ranks computed different bits of one shard."""

    chosen: Chosen
    tensor: str
    """The first that differs, in the model's order."""
    rank: int
    """That computes wrongly; -1: no majority says which."""
    host: str
    in_step: bool
    """Whether the step's own gradients are wrong, or may be."""
    words: str

    def error(self, on_corruption: OnCorruption) -> ComputedWrongly:
        """What the run ends with, or this team."""
        excludes = on_corruption == "exclude" and self.rank >= 0
        return ComputedWrongly(self.words, self.rank, self.host, excludes=excludes)


@dataclass(frozen=True)
class Audited:
    """What came of a shard's second computation."""

    chosen: Chosen
    corruption: Corruption | None


def compare(
    group: Group,
    asked: Chosen,
    names: Sequence[str],
    own: Callable[[], Computed],
    compute: Callable[[], Computed],
) -> Corruption | None:
    """Compare what the owner computed with what another rank computes; a collective call. `own` is for the owner,
    `compute` computes the shard on this rank. The global generators go on from where they were."""
    with generators_kept():
        mine: list[Computed] = []
        if group.rank == asked.owner:
            mine.append(own())
        if group.rank == asked.by:
            mine.append(compute())
        digests = [one.digests() for one in mine]
        whole = [xxhash.xxh3_64_hexdigest(json.dumps(one).encode()) for one in digests]
        everyones = [json.loads(text) for text in group.gather(json.dumps(whole), _WHAT)]
        if len({one for of_rank in everyones for one in of_rank}) == 1:
            return None
        mine.append(compute())
        digests.append(mine[-1].digests())
        own_words = json.dumps(asdict(Told(socket.gethostname(), digests)))
        told = [Told(**json.loads(text)) for text in group.gather(own_words, _WHAT)]
        return _corruption(group, asked, [*_BESIDE, *names], mine, told)


def _corruption(
    group: Group, asked: Chosen, names: Sequence[str], mine: Sequence[Computed], told: Sequence[Told]
) -> Corruption:
    verdict = judge(told)
    results = [result for one in told for result in one.digests]
    at = next(at for at in range(len(names)) if len({result[at] for result in results}) > 1)
    tensor = names[at]
    where = f"in step {asked.step}, shard {asked.shard}"
    if verdict.right is None:
        suspects = verdict.unsteady if len(verdict.unsteady) == 1 else []
        rank = suspects[0] if suspects and len(told) > 1 else -1
        if rank >= 0:
            words = (
                f"{_names(told, suspects)} computes {tensor} {where}, with other bits each time; that machine "
                "computes or remembers wrongly"
            )
        elif len(told) == 1:
            words = (
                f"{_names(told, [0])} computes {tensor} {where}, with other bits each time; this machine computes or "
                "remembers wrongly"
            )
        else:
            sides = _names(told, [asked.owner, asked.by])
            words = (
                f"{sides} compute other bits of {tensor} {where}, and no majority says which is right; one of these "
                "machines computes or remembers wrongly. With 3 ranks or more a third decides"
            )
        return Corruption(asked, tensor, rank, told[rank].host if rank >= 0 else "", True, words)
    rank = verdict.wrong[0]
    result = next(result for result in told[rank].digests if result != verdict.right)
    at = next(at for at in range(len(names)) if result[at] != verdict.right[at])
    tensor = names[at]
    bits = _difference(group, verdict, rank, at - len(_BESIDE), mine, told)
    steady = (
        "computed again they are right" if rank in verdict.unsteady else "computed again they are as wrong"
    )
    others = [other for other in range(len(told)) if other not in verdict.wrong]
    words = (
        f"{_names(told, [rank])} computes wrongly: {where}, its bits of {tensor} are not those of "
        f"{_names(told, others) if others else 'its other computations'}: {bits}; {steady}"
    )
    in_step = told[asked.owner].digests[0] != verdict.right
    return Corruption(asked, tensor, rank, told[rank].host, in_step, words)


def _difference(
    group: Group, verdict: Verdict, rank: int, at: int, mine: Sequence[Computed], told: Sequence[Told]
) -> str:
    """How a rank's wrong tensor differs from the right one, in words; a collective call."""
    if at < 0:
        return "another number"
    wrong = next(place for place, result in enumerate(told[rank].digests) if result != verdict.right)
    shown = mine[0].gradients[at]
    if group.rank == rank:
        shown = mine[wrong].gradients[at]
    flat = torch.frombuffer(bytearray(raw_bytes(shown)), dtype=torch.uint8)
    group.from_rank(rank, flat, _WHAT)
    right = next(
        (place for place, result in enumerate(told[group.rank].digests) if result == verdict.right), None
    )
    words = ""
    if right is not None:
        truth = torch.frombuffer(bytearray(raw_bytes(mine[right].gradients[at])), dtype=torch.uint8)
        size = shown.element_size()
        other = (flat.view(-1, size) != truth.view(-1, size)).any(1).nonzero().flatten()
        first = int(other[0])
        seen, wanted = (bytes(b.view(-1, size)[first].flip(0).tolist()).hex() for b in (flat, truth))
        words = (
            f"{len(other)} of {shown.numel()} elements differ, element {first} is 0x{seen} and not 0x{wanted}"
        )
    return next((text for text in group.gather(words, _WHAT) if text), "")


def _names(told: Sequence[Told], ranks: Sequence[int]) -> str:
    """Ranks and their hosts."""
    return " and ".join(f"rank {rank} on {told[rank].host}" for rank in ranks)
