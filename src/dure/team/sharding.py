"""Optimizers that the ranks of a node hold in parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dure.base.errors import UsageError
from dure.checkpoint.state import Part, Sharing
from dure.comm.group import Group, node_group
from dure.comm.sharded_optimizer import ShardedUpdate, handover_within
from dure.comm.topology import Topology
from dure.observe.heartbeat import Phase
from dure.step.forward import Setting
from dure.step.lockstep import Lockstep


@dataclass(frozen=True)
class _Sharded:
    """An optimizer that ranks hold in parts, and those ranks."""

    optimizer: torch.optim.Optimizer
    ranks: Group
    update: ShardedUpdate


class ShardedOptimizers:
    """Those of a team."""

    def __init__(self, topology: Topology, setting: Setting, group: Group) -> None:
        self._topology = topology
        self._setting = setting
        self._group = group
        self._sharded: dict[int, _Sharded] = {}

    def add(
        self,
        lockstep: Lockstep,
        optimizer: torch.optim.Optimizer,
        *,
        share_weights: bool,
        own_gradients: bool,
    ) -> None:
        """Give each rank of a node its part; a collective call."""
        topology = self._topology
        if topology.local_size == 1 or id(optimizer) in self._sharded:
            return
        device = self._setting.device
        deadline_seconds = self._setting.deadline_seconds
        ranks = node_group(self._group, topology.node, topology.local_rank, device, deadline_seconds)
        update = ShardedUpdate(
            optimizer,
            ranks.rank,
            ranks.size,
            handover_within(ranks, lockstep.model.module, share_weights, device, deadline_seconds),
            lambda waiting: lockstep.say(Phase.EXCHANGE if waiting else Phase.UPDATE),
        )
        self._sharded[id(optimizer)] = _Sharded(optimizer, ranks, update)
        if own_gradients and topology.nodes == 1:
            lockstep.keep_own(update.own_places)

    def ranks_of(self, optimizer: torch.optim.Optimizer | None) -> Group | None:
        """The ranks that hold it together; None for one that every rank has whole."""
        sharded = self._sharded.get(id(optimizer))
        return sharded.ranks if sharded is not None else None

    def sharing(self, optimizer: torch.optim.Optimizer) -> Sharing | None:
        """Which parts of it this rank holds; None for one that every rank has whole."""
        sharded = self._sharded.get(id(optimizer))
        if sharded is None:
            return None
        parts = {
            part: Part(whole, cut.start, cut.stop) for part, (whole, cut) in sharded.update.parts.items()
        }
        return Sharing(parts, sharded.ranks, self._topology.node, self._topology.nodes)

    def close(self) -> None:
        """Let go of what ranks share."""
        for sharded in self._sharded.values():
            sharded.update.close()
        self._sharded.clear()


def refuse_missing(
    optimizer: torch.optim.Optimizer, names: dict[torch.nn.Parameter, str], *, own_gradients: bool
) -> None:
    """With `own_gradients`, a parameter of another optimizer would have no gradient."""
    held = {p for group in optimizer.param_groups for p in group["params"]}
    missing = [name for p, name in names.items() if p.requires_grad and p not in held]
    if own_gradients and missing:
        raise UsageError(
            f"own_gradients: {missing[0]} is not in this optimizer, and would have no gradient; give the optimizer "
            "all parameters, or leave own_gradients out"
        )
