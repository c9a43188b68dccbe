"""Which ranks of a process group are on one node, found without a launcher's variables.

A script may make its process group in any way (`mp.spawn`, a file, a TCP store), so that nothing in the environment
says who is where. Ranks tell each other the kernel and the namespaces that they run in instead.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from dure.comm.group import Group
from dure.comm.topology import Topology

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def node_identity() -> str:
    """The same text in two processes if they can share memory: same kernel, same process and network namespaces."""
    try:
        names = [
            _BOOT_ID.read_text().strip(),
            os.readlink("/proc/self/ns/pid"),
            os.readlink("/proc/self/ns/net"),
        ]
    except OSError:  # not Linux, or no /proc: a node of its own
        names = [f"{os.getpid()}"]
    return " ".join([socket.gethostname(), *names])


def topology_of(group: Group, *, leader_host: str = "") -> Topology:
    """The topology of the ranks of a process group; a collective call."""
    return topology_from(group.gather(node_identity(), "finding nodes"), group.rank, leader_host)


def topology_from(identities: Sequence[str], rank: int, leader_host: str = "") -> Topology:
    """The topology of ranks with these `node_identity`s, by rank."""
    nodes = list(dict.fromkeys(identities))
    local = [other for other, identity in enumerate(identities) if identity == identities[rank]]
    return Topology(
        rank=rank,
        size=len(identities),
        local_rank=local.index(rank),
        local_size=len(local),
        node=nodes.index(identities[rank]),
        nodes=len(nodes),
        leader_host=leader_host or identities[0].split(" ")[0],
        leader_port=0,
        launcher="hand",
        run_id="",
    )
