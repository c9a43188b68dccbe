"""All engines by name; none is imported before it is asked for."""

from __future__ import annotations

from enum import StrEnum

from dure.engine.interface import Scheduler


class Engine(StrEnum):
    """Whose machines `dure train` starts agents on."""

    LOCAL = "local"
    SSH = "ssh"
    RAY = "ray"


class Queue(StrEnum):
    """Whom `dure submit` hands a job to."""

    SLURM = "slurm"
    KUBERNETES = "kubernetes"
    RAY = "ray"


def scheduler(queue: Queue, address: str | None = None) -> Scheduler:
    """The scheduler of that name; `address` is where Ray's dashboard is."""
    if queue is Queue.KUBERNETES:
        from dure.engine.kubernetes.scheduler import KubernetesScheduler

        return KubernetesScheduler()
    if queue is Queue.RAY:
        from dure.engine.ray.scheduler import RayScheduler

        return RayScheduler(address)
    from dure.engine.slurm.scheduler import SlurmScheduler

    return SlurmScheduler()
