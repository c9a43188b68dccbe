"""How many files and connections a process of a run has open, and the limit that the system sets to them.

Measured on 2 to 8 ranks of one and two nodes (`tests/ranks/test_open_files.py`): a rank has a connection to every other
rank for each of the groups that span the team (training, gradients, checkpoints, and loading weights between nodes),
one to every rank of its node for each of two more, and one to its peer on every other node.
"""

from __future__ import annotations

import resource
import sys

UNLIMITED = sys.maxsize
_TEAM_GROUPS = 4
_NODE_GROUPS = 2
_PER_LOCAL_RANK = 4
"""Of a rank: memory and processes of the others on its node. Of an agent: pipes to each of its own."""
_FIXED = 64
_SPARE = 128
"""For what the job itself opens: samples, data-loader workers, loggers."""
_PER_NODE = 3
"""Of the leader's agent: a node's connection, and as many again twice over that are not authenticated yet."""


def needed(ranks: int, local_ranks: int, nodes: int) -> int:
    """How many a rank, or the leader's agent, may have open in a team of so many ranks."""
    local = (_NODE_GROUPS + _PER_LOCAL_RANK) * local_ranks
    rank = _TEAM_GROUPS * ranks + nodes + local
    agent = (
        ranks + _PER_NODE * nodes + local
    )  # every rank has a connection to the store, which is the agent's
    return max(rank, agent) + _FIXED + _SPARE


def limits() -> tuple[int, int]:
    """(What applies now, what a process may raise it to); `UNLIMITED` for no limit."""
    soft, hard = (
        UNLIMITED if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    return soft, hard


def allow(need: int) -> None:
    """Raise this process's limit, and that of those it starts, to what is needed, as far as the system lets it."""
    soft, hard = limits()
    if soft < need:
        kept = resource.RLIM_INFINITY if hard == UNLIMITED else hard
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(need, hard), kept))
