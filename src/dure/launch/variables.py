"""Where a node is, as launchers say it in variables that hand over a node's number and addresses, and start no ranks.

SkyPilot   SKYPILOT_NODE_RANK, SKYPILOT_NODE_IPS (one a line), on every node
TorchX     TORCHX_REPLICA_IDX, TORCHX_RANK0_HOST, on every replica; how many there are only the command line says
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence

from dure.base.errors import UsageError
from dure.launch.nodes.address import resolve

PORT = 29400
"""Of the leader, when MASTER_PORT does not say another."""
_ALREADY = ("--node-rank", "--node_rank", "--leader")
_NODES = ("--nodes", "--nnodes")
_AWS_BATCH = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"
"""What TorchX takes for the first replica's host on AWS Batch, where it cannot set a variable of its own."""


def own_address() -> str:
    """This machine's address by its own name; raises UsageError where that is the loopback."""
    return resolve(socket.gethostname())


def command_for(
    argv: Sequence[str], environ: Mapping[str, str], own: Callable[[], str] = own_address
) -> list[str]:
    """The words behind `dure`: `train JOB.toml …` or `run SCRIPT …`, and where this node is, if a variable says so."""
    if not argv:
        raise UsageError(
            "say what to start: python -m dure.launch job.toml …, or python -m dure.launch script.py …"
        )
    if argv[0] in ("train", "run"):
        verb, rest = argv[0], list(argv[1:])
    else:
        target = next((word for word in argv if not word.startswith("-")), "")
        verb, rest = ("train" if target.endswith(".toml") else "run"), list(argv)
    if any(_names(word, _ALREADY) for word in rest):
        return [verb, *rest]
    return [verb, *_place(rest, environ, own), *rest]


def _port(environ: Mapping[str, str]) -> int:
    return _number("MASTER_PORT", environ, 65536) if "MASTER_PORT" in environ else PORT


def _place(rest: Sequence[str], environ: Mapping[str, str], own: Callable[[], str]) -> list[str]:
    nodes_given = any(_names(word, _NODES) for word in rest)
    if "SKYPILOT_NODE_RANK" in environ:
        addresses = environ.get("SKYPILOT_NODE_IPS", "").split()
        if not addresses:
            raise UsageError(
                "SKYPILOT_NODE_RANK is set, but not SKYPILOT_NODE_IPS; start this from a task's run section"
            )
        node = _number("SKYPILOT_NODE_RANK", environ, len(addresses))
        if len(addresses) == 1:
            return []
        count = [] if nodes_given else [f"--nodes={len(addresses)}"]
        return [*count, f"--node-rank={node}", f"--leader={addresses[0]}:{_port(environ)}"]
    if "TORCHX_REPLICA_IDX" in environ:
        node = _number("TORCHX_REPLICA_IDX", environ, None)
        host = environ.get("TORCHX_RANK0_HOST") or environ.get(_AWS_BATCH, "")
        if not nodes_given:
            if node == 0 and host in ("", "localhost"):
                return []  # one replica, as far as anybody has said
            raise UsageError(
                "TorchX does not say how many replicas there are; give it, as in --nodes={num_replicas}"
            )
        if not host:
            raise UsageError(
                "TORCHX_REPLICA_IDX is set, but not TORCHX_RANK0_HOST, where the first replica is; pass it on, or give "
                "--node-rank and --leader"
            )
        # The first replica is told `localhost`, the others its name.
        return [f"--node-rank={node}", f"--leader={own() if node == 0 else host}:{_port(environ)}"]
    return []


def _names(word: str, options: Sequence[str]) -> bool:
    return word.partition("=")[0] in options


def _number(name: str, environ: Mapping[str, str], below: int | None) -> int:
    text = environ[name]
    if not (text.isascii() and text.isdigit() and len(text) < 9) or (
        below is not None and int(text) >= below
    ):
        bounds = "" if below is None else f" from 0 to {below - 1}"
        raise UsageError(f"{name} is {text!r}; it must be a whole number{bounds}")
    return int(text)
