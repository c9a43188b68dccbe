"""Which way gradients take: alone, through shared memory, between nodes, or plainly over the backend."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist

from dure.base.say import say
from dure.comm.group import Group, part_of
from dure.comm.link import Link, lay_link
from dure.comm.reduce.between_nodes import BetweenNodes
from dure.comm.reduce.exchanger import Exchanger, Wire, most_pieces
from dure.comm.reduce.over_backend import Alone, OverGloo
from dure.comm.reduce.shared_memory import ThroughSharedMemory
from dure.comm.reduce.step_totals import StepTotals
from dure.comm.shm_segment import share_or_none

Transport = Literal["auto", "gloo"]
WireName = Literal["fp32", "bf16"]


def wire_named(name: WireName) -> Wire:
    """The wire of a job's `reduce.wire`."""
    return Wire(torch.bfloat16 if name == "bf16" else torch.float32)


@dataclass(frozen=True)
class Place:
    """Where this rank stands among the nodes."""

    rank: int
    ranks: int
    local_rank: int
    local_size: int
    nodes: int
    shards: int
    deadline_seconds: float
    leader_host: str
    link_secret: bytes = field(default=b"", repr=False)
    """What ranks of different nodes prove to each other; empty when no agent of ours started them."""


class ExchangerFactory:
    """The process groups of the communication threads, made once; a new exchanger for every model."""

    def __init__(self, place: Place, device: torch.device, wire: Wire, transport: Transport) -> None:
        self.place = place
        self.wire = wire
        self._everyone = Group(None, place.rank, place.ranks)
        self._gradients: dist.ProcessGroup | None = None
        self._local: Group | None = None
        self._peers: Group | None = None
        self._shares = transport == "auto" and device.type == "cpu"
        if place.ranks == 1:
            return
        gloo = dist.new_group(backend="gloo")
        self._everyone = Group(gloo, place.rank, place.ranks)
        self._gradients = dist.new_group(backend="nccl") if device.type == "cuda" else gloo
        self._shares = self._shares and self._is_regular()
        if self._shares and place.nodes > 1:
            self._local, self._peers = self._groups_of_nodes()

    def exchanger(self, *, sync: bool = True) -> Exchanger:
        """The best way that these ranks can go together; a collective call."""
        place, everyone = self.place, self._everyone
        if place.ranks == 1 or not sync:
            return Alone(place.rank)
        if self._shares:
            local = self._local or everyone
            first = place.rank - place.local_rank
            extras = [
                most_pieces(first + rank, place.ranks, place.shards) - 1 for rank in range(place.local_size)
            ]
            totals = StepTotals.numbers(place.shards, place.ranks)
            shared = share_or_none(
                local,
                lambda: ThroughSharedMemory(local, extras, totals, place.deadline_seconds, self.wire),
                "gradients go over Gloo, same bits",
            )
            possible = everyone.gather(str(shared is not None), "choosing a way for gradients")
            if shared is not None and set(possible) == {"True"}:
                if place.nodes == 1:
                    return shared
                assert self._peers is not None
                link = self._link() if place.nodes == 2 else None
                return BetweenNodes(shared, place.local_size, self._peers, everyone, self.wire, link)
            if shared is not None:
                shared.close()
        return OverGloo(self._gradients, everyone, self.wire)

    def _link(self) -> Link | None:
        """To the rank of the same local number on the other of two nodes."""
        place = self.place
        first = place.rank < place.local_size
        link = lay_link(
            self._everyone,
            place.rank + (place.local_size if first else -place.local_size),
            listens=not first,  # the leader is on the first node, and each other one knows its way there
            leader_host=place.leader_host,
            deadline_seconds=place.deadline_seconds,
            secret=place.link_secret,
        )
        if link is None and place.rank == 0:
            say("no TCP connection of our own between the nodes; gradients go over Gloo, same bits")
        return link

    def _is_regular(self) -> bool:
        """Whether every node has the same number of ranks, numbered node by node."""
        place = self.place
        own = [place.rank, place.local_rank, place.local_size, place.nodes]
        told = [json.loads(t) for t in self._everyone.gather(json.dumps(own), "comparing nodes")]
        return all(
            size == place.local_size and size * nodes == place.ranks and rank % size == local
            for rank, local, size, nodes in told
        )

    def _groups_of_nodes(self) -> tuple[Group, Group]:
        """This node's ranks, and the ranks of all nodes with this local number."""
        place, device = self.place, torch.device("cpu")
        nodes = [range(at, at + place.local_size) for at in range(0, place.ranks, place.local_size)]
        peers = [range(at, place.ranks, place.local_size) for at in range(place.local_size)]
        return part_of(self._everyone, nodes, device), part_of(self._everyone, peers, device)
