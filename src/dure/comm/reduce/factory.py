"""Which way gradients take: alone, through shared memory, between nodes, or plainly over the backend."""

from __future__ import annotations

import json
from typing import Literal

import torch
import torch.distributed as dist

from dure.base.say import say
from dure.comm.group import Group, group_of, part_of
from dure.comm.link import Link, lay_link
from dure.comm.reduce.between_nodes import BetweenNodes
from dure.comm.reduce.exchanger import Exchanger, Wire, most_pieces
from dure.comm.reduce.over_backend import Alone, OverGloo
from dure.comm.reduce.shared_memory import ThroughSharedMemory
from dure.comm.reduce.step_totals import StepTotals
from dure.comm.shm_segment import share_or_none
from dure.comm.topology import Topology
from dure.device.accelerator import is_host

Transport = Literal["auto", "gloo"]
WireName = Literal["fp32", "bf16"]


def wire_named(name: WireName) -> Wire:
    """The wire of a job's `reduce.wire`."""
    return Wire(torch.bfloat16 if name == "bf16" else torch.float32)


class ExchangerFactory:
    """The process groups of the communication threads, made once; a new exchanger for every model."""

    def __init__(
        self,
        topology: Topology,
        shards: int,
        device: torch.device,
        wire: Wire,
        transport: Transport,
        *,
        deadline_seconds: float,
        link_secret: bytes = b"",
    ) -> None:
        """`link_secret` is what ranks of different nodes prove to each other; empty when no agent of ours started them.

        A collective call.
        """
        self.wire = wire
        self._topology = topology
        self._shards = shards
        self._deadline_seconds = deadline_seconds
        self._link_secret = link_secret
        self.everyone = Group(None, topology.rank, topology.size)
        """All ranks; for the communication thread, and for others only while it has nothing to do."""
        self._gradients: dist.ProcessGroup | None = None
        self._local: Group | None = None
        self._peers: Group | None = None
        self._shares = transport == "auto" and is_host(device)
        if topology.size == 1:
            return
        self._gradients = group_of(None, deadline_seconds, device)
        self.everyone = Group(self._gradients, topology.rank, topology.size)
        self._shares = self._shares and self._is_regular()
        if self._shares and topology.nodes > 1:
            self._local, self._peers = self._groups_of_nodes()

    def exchanger(self, *, sync: bool = True) -> Exchanger:
        """The best way that these ranks can go together; a collective call."""
        topology, everyone = self._topology, self.everyone
        if topology.size == 1 or not sync:
            return Alone(topology.rank)
        if self._shares:
            local = self._local or everyone
            first = topology.rank - topology.local_rank
            extras = [
                most_pieces(first + rank, topology.size, self._shards) - 1
                for rank in range(topology.local_size)
            ]
            totals = StepTotals.numbers(self._shards, topology.size)
            shared = share_or_none(
                local,
                lambda: ThroughSharedMemory(
                    local, extras, totals, self._deadline_seconds, self.wire, is_whole=topology.nodes == 1
                ),
                "gradients go over Gloo, same bits",
            )
            possible = everyone.gather(str(shared is not None), "choosing a way for gradients")
            if shared is not None and set(possible) == {"True"}:
                if topology.nodes == 1:
                    return shared
                assert self._peers is not None
                link = self._link() if topology.nodes == 2 else None
                return BetweenNodes(shared, topology.local_size, self._peers, everyone, self.wire, link)
            if shared is not None:
                shared.close()
        return OverGloo(self._gradients, everyone, self.wire)

    def _link(self) -> Link | None:
        """To the rank of the same local number on the other of two nodes."""
        topology = self._topology
        first = topology.rank < topology.local_size
        link = lay_link(
            self.everyone,
            topology.rank + (topology.local_size if first else -topology.local_size),
            listens=not first,  # the leader is on the first node, and each other one knows its way there
            leader_host=topology.leader_host,
            deadline_seconds=self._deadline_seconds,
            secret=self._link_secret,
        )
        if link is None and topology.rank == 0:
            say("no TCP connection of our own between the nodes; gradients go over Gloo, same bits")
        return link

    def _is_regular(self) -> bool:
        """Whether every node has the same number of ranks, numbered node by node."""
        topology = self._topology
        own = [topology.rank, topology.local_rank, topology.local_size, topology.nodes]
        told = [json.loads(t) for t in self.everyone.gather(json.dumps(own), "comparing nodes")]
        return all(
            size == topology.local_size and size * nodes == topology.size and rank % size == local
            for rank, local, size, nodes in told
        )

    def _groups_of_nodes(self) -> tuple[Group, Group]:
        """This node's ranks, and the ranks of all nodes with this local number."""
        topology, device = self._topology, torch.device("cpu")
        nodes = [range(at, at + topology.local_size) for at in range(0, topology.size, topology.local_size)]
        peers = [range(at, topology.size, topology.local_size) for at in range(topology.local_size)]
        seconds = self._deadline_seconds
        return part_of(self.everyone, nodes, device, seconds), part_of(self.everyone, peers, device, seconds)
