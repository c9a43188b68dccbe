"""The sections of a job file that say where it runs. They never change a bit of what is trained."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from dure.config.limits import LONGEST_SECONDS, MOST_THREADS, Count, CountOrNone, Nodes, Seconds
from dure.config.section import Section


class Mount(Section):
    """A folder or a file that is there inside the image."""

    source: str
    """An absolute path on the node; `{storage}` stands for the job's storage folder, `{run}` for the run's folder."""
    target: str | None = None
    """Where it is inside; the same path when not given."""
    writable: bool = False
    """Whether the ranks may write there; anything else refuses."""


class Cluster(Section):
    """The nodes, and what they run in. Never changes a bit."""

    nodes: Nodes = 1
    """Machines that train together, `team.ranks` ranks on each."""
    min_nodes: Nodes | None = None
    """The run goes on with fewer nodes, down to so many, when some are lost, and takes them back when they come; as
    `--nodes 1:2` says it. Without it, always `nodes`."""
    hosts: tuple[str, ...] = ()
    """Names or addresses of the nodes, for ssh; the first is the leader."""
    ssh: str = "ssh"
    """The ssh command, with options if there are any."""
    python: str | None = None
    """The interpreter on the hosts that dure is installed for; the path of the one here when not given."""
    interface: str | None = None
    """The network interface that ranks talk over; when not given, the one of the route to the leader."""
    image: str | None = None
    """A squashfs image that every rank runs in (`dure image build`): a path in the storage, or an absolute one."""
    runner: Literal["auto", "pyxis", "enroot", "apptainer", "bubblewrap"] = "auto"
    """What runs the image; `auto`: the first of these that starts it on the node, the last of which is ours."""
    mounts: tuple[Mount, ...] = ()
    """What is there inside the image. Without any: the storage read-only, the job's folder read-only, the run's folder
    and the checkpoints' read-write."""
    tls: bool = False
    """Whether what the nodes' agents tell each other is encrypted (TLS 1.3, with a certificate that is made from the
    team's key); takes the extra `tls`. Gradients and torch's store are not."""
    join_seconds: Seconds = 300.0
    """How long nodes wait for each other to come."""
    lost_seconds: Annotated[float, Field(gt=2, le=LONGEST_SECONDS)] = 6.0
    """A node that has not been heard of for so long is lost."""

    @field_validator("image", mode="before")
    @classmethod
    def _empty_is_none(cls, value: object) -> object:
        return value or None  # --set cluster.image= takes it away

    @model_validator(mode="after")
    def _fewest_first(self) -> Cluster:
        if self.min_nodes is not None and self.min_nodes > self.nodes:
            raise ValueError(
                f"cluster.min_nodes is {self.min_nodes}, more than cluster.nodes, which is {self.nodes}; turn "
                "them round"
            )
        if self.hosts and len(self.hosts) != self.nodes:
            raise ValueError(
                f"cluster.nodes is {self.nodes}, but cluster.hosts has {len(self.hosts)}: name all of them"
            )
        odd = next(
            (host for host in self.hosts if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:@-]*", host)), None
        )
        if odd is not None:
            raise ValueError(f"cluster.hosts has {odd!r}, which is no name of a host")
        if self.hosts and len(set(self.hosts)) != len(self.hosts):
            raise ValueError(f"cluster.hosts names a host twice: {', '.join(self.hosts)}")
        return self


class Slurm(Section):
    """What `dure submit` asks Slurm for. Never changes a bit."""

    partition: str | None = None
    """The partition; the cluster's default when not given."""
    account: str | None = None
    """The account that is charged."""
    time: Count | str | None = None
    """The time limit, as sbatch takes it; before it is over the run saves, ends with 75, and is queued again."""
    signal_seconds: Count = 120
    """How long before the time limit the run is told to save."""
    requeues: CountOrNone = 10
    """How often the job may be queued again after a time limit, a preemption or a lost node."""
    cpus_per_rank: Count | None = None
    """Cores for each rank; `team.threads` when not given."""
    gpus_per_node: Annotated[int, Field(ge=0, le=MOST_THREADS)] = 0
    """GPUs to ask for on each node."""
    options: tuple[str, ...] = ()
    """Further options of sbatch, such as `--constraint=g5`; one each."""
