"""The ways to a node, here, over ssh or as a step of Slurm: each a command that becomes the doctor's part there."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from dure.config import Cluster
from dure.doctor.reach import Node
from dure.engine.slurm import queue
from dure.engine.slurm.allocation import Allocation
from dure.engine.ssh.hosts import known_hosts
from dure.image.contents import PYTHON


def here(order: bytes | None) -> tuple[Node, ...]:
    """This machine."""
    command = _part(sys.executable, order)
    return (Node("localhost", command, f"{sys.executable} -m dure --version", order),)


def over_ssh(cluster: Cluster, order: bytes | None) -> tuple[Node, ...]:
    """The hosts of a job. Its part runs here for the one that is this machine."""
    environment = _with_absolute_paths(os.environ)
    return tuple(
        Node(
            host.name,
            tuple(host.command(_part(_python_of(cluster, here=host.here), order), "/", environment)),
            f"{cluster.ssh} {host.name} true",
            order,
        )
        for host in known_hosts(cluster.hosts, cluster.ssh)
    )


def on_slurm(
    allocation: Allocation, cpus: int | None, order: bytes | None, image_options: Sequence[str] = ()
) -> tuple[Node, ...]:
    """The nodes of an allocation, a step on each. `image_options` of srun run the image by themselves."""
    # This interpreter, by its path, as `dure submit` has it.
    part = _part(PYTHON if image_options else sys.executable, order)
    environment = _with_absolute_paths(queue.outside_environment())
    return tuple(
        Node(
            name,
            tuple(allocation.step(name, part, cpus=cpus, options=image_options)),
            f"srun --nodelist={name} true",
            order,
            environment,
        )
        for name in allocation.nodes
    )


def _part(python: str, order: bytes | None) -> tuple[str, ...]:
    return (python, "-m", "dure", "doctor", "--serve" if order is None else "--serve-inside")


def _python_of(cluster: Cluster, *, here: bool) -> str:
    return sys.executable if here else cluster.python or sys.executable


def _with_absolute_paths(environ: Mapping[str, str]) -> dict[str, str]:
    """The same code at the same path, where it is told by the environment: what differs there is for the checks."""
    paths = [os.path.abspath(path) for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {**environ, "PYTHONPATH": os.pathsep.join(paths)} if paths else dict(environ)
