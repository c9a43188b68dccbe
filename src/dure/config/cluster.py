"""The sections of a job file that say where it runs. They never change a bit of what is trained."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from dure.config.limits import (
    LARGEST_COUNT,
    LONGEST_SECONDS,
    MOST_THREADS,
    Count,
    CountOrNone,
    Nodes,
    Seconds,
)
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


class Ray(Section):
    """What `--engine ray` asks Ray for. Never changes a bit."""

    address: str | None = None
    """Where Ray is: HOST:PORT, or ray://HOST:PORT; as `--ray-address` says it. When not given, RAY_ADDRESS, or the Ray
    that runs on this machine."""
    cpus_per_rank: Count | None = None
    """Ray's CPUs for each rank; `team.threads` when not given."""
    gpus_per_node: Annotated[int, Field(ge=0, le=MOST_THREADS)] = 0
    """Ray's GPUs for each node."""
    resources: dict[str, Annotated[float, Field(gt=0, le=LARGEST_COUNT)]] = Field(default={})
    """Further resources of Ray for each node, such as `{ c7i = 1 }`."""
    strategy: Literal["auto", "STRICT_SPREAD", "SPREAD", "PACK"] = "auto"
    """How nodes of the run are placed on nodes of Ray; `auto`: each on one of its own (STRICT_SPREAD) where there are
    enough, else SPREAD."""
    wait_seconds: Seconds = 600.0
    """How long Ray, or its autoscaler, may take to find a place for the fewest nodes."""

    @field_validator("address", mode="before")
    @classmethod
    def _empty_is_none(cls, value: object) -> object:
        return value or None


class Toleration(Section):
    """A taint of Kubernetes' nodes that the pods bear."""

    key: str | None = None
    """The taint's key; any when not given."""
    operator: Literal["Exists", "Equal"] = "Exists"
    """`Equal` compares the value too."""
    value: str | None = None
    """The taint's value."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Which effect; all when not given."""


class Volume(Section):
    """A volume of Kubernetes, in every pod."""

    claim: str | None = None
    """The PersistentVolumeClaim, such as one of FSx for Lustre; give this or `host_path`."""
    host_path: str | None = None
    """A folder of the node, where every node has mounted the storage; give this or `claim`."""
    path: str
    """Where it is in the pod: an absolute path."""
    sub_path: str | None = None
    """The folder in the volume that is mounted; the whole volume when not given."""
    writable: bool = False
    """Whether pods may write there; anything else refuses."""

    @model_validator(mode="after")
    def _one_source(self) -> Volume:
        if (self.claim is None) == (self.host_path is None):
            given = "neither is given" if self.claim is None else "both are given"
            raise ValueError(f"a volume needs claim or host_path, one of them; {given}")
        return self


class Kubernetes(Section):
    """What `dure submit --engine kubernetes` asks Kubernetes for. Never changes a bit."""

    image: str | None = None
    """The container image with Python, torch and dure, by its digest: registry/name@sha256:…"""
    python: str = "python3"
    """The interpreter in the image that dure is installed for."""
    namespace: str = "default"
    """The namespace."""
    volumes: tuple[Volume, ...] = ()
    """The volumes that all pods see; one of them holds the job, one that is writable the run."""
    cpus_per_rank: Count | None = None
    """CPUs for each rank; `team.threads` when not given."""
    memory: str | None = None
    """Memory of a pod, as Kubernetes writes it: 16Gi. No limit when not given."""
    shm: str = "2Gi"
    """Size of /dev/shm, where ranks of a node meet; it counts as the pod's memory."""
    gpus_per_node: Annotated[int, Field(ge=0, le=MOST_THREADS)] = 0
    """GPUs for each pod, as nvidia.com/gpu."""
    resources: dict[str, str] = Field(default={})
    """Further resources of a pod, such as `{ "vpc.amazonaws.com/efa" = "1" }`."""
    node_selector: dict[str, str] = Field(default={})
    """Labels that the nodes must have, such as `{ "node.kubernetes.io/instance-type" = "c7i.8xlarge" }`."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints that the pods bear."""
    service_account: str | None = None
    """The service account of the pods; they have none of its tokens without it."""
    user: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """The user id in the pods, and the owner of what they write; the image's own when not given."""
    port: Annotated[int, Field(ge=1024, lt=65536)] = 29400
    """The leader's port."""
    retries: CountOrNone = 10
    """How often the run may be started again after it was stopped (75) or a pod failed."""
    grace_seconds: Count = 120
    """How long a pod that is ended may take to save."""
    jobset: bool = False
    """Whether a JobSet is written instead of a Job and a Service, as `--jobset` says it; the cluster must have it."""

    @field_validator("image", mode="before")
    @classmethod
    def _empty_is_none(cls, value: object) -> object:
        return value or None
