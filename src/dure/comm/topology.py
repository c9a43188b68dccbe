"""Which rank this process is, of how many, on which node: a frozen value, read once.

The only reader of rank environment variables. It looks in this order:

    1. `--rank`, `--world-size`, `--master`     by hand, as in four terminals
    2. RANK, WORLD_SIZE, MASTER_ADDR, …         `dure run`, torchrun, or by hand
    3. SLURM_PROCID, SLURM_STEP_NUM_TASKS, …    a step of srun
    4. nothing of these                         alone: rank 0 of 1

Arguments and variables may complete each other. Where they say different things nobody can know which one is
meant, and a wrong guess would hang, or train several models: that is an error, never a silent choice.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dure.base.errors import UsageError
from dure.base.run_folder import RunFolder
from dure.base.slurm_lists import expand_counts, expand_hosts

Launcher = Literal["dure", "torchrun", "srun", "hand", "alone"]

LOOPBACK = "127.0.0.1"
RUN_VARIABLE = "DURE_RUN"  # set by our launcher: the folder in which the run keeps its files
KEEP_VARIABLE = (
    "DURE_KEEP"  # set by our launcher: its pid, and its descriptors of memory that outlives the ranks
)
LINK_SECRET_VARIABLE = (
    "DURE_LINK_SECRET"  # set by our launcher: its pid, and a descriptor; never the secret itself
)
SIZES = ("RANK", "WORLD_SIZE")
MASTER = ("MASTER_ADDR", "MASTER_PORT")
PLACE = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
ARGUMENT_OF = {"RANK": "--rank", "WORLD_SIZE": "--world-size"} | dict.fromkeys(MASTER, "--master")

# The steps of Slurm itself have numbers from here up: the batch script's, the shell's that salloc opens.
FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class Topology:
    """One rank's place among all ranks."""

    rank: int
    size: int
    local_rank: int
    """This rank's number on its node. Slurm may deal ranks out to nodes by turns: never compute it."""
    local_size: int
    """Ranks on this node; other nodes may have more or fewer."""
    node: int
    nodes: int
    leader_host: str
    """Where rank 0 listens for the others."""
    leader_port: int
    """0 when alone: nobody has to find it."""
    launcher: Launcher
    run_id: str
    """The same on all ranks of this run, and different from every other run that is alive on these hosts."""

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_node_leader(self) -> bool:
        """Whether this is the first rank of its node."""
        return self.local_rank == 0


def arguments() -> argparse.ArgumentParser:
    """A parent for a script's own parser, with the arguments that start ranks by hand.

    parser = argparse.ArgumentParser(parents=[arguments()])
    """
    parser = argparse.ArgumentParser(add_help=False)
    group = parser.add_argument_group(
        "starting ranks by hand", "leave these out under dure, torchrun or srun"
    )
    group.add_argument(
        "--rank", type=int, metavar="N", help="this process's number, from 0 to world size - 1"
    )
    group.add_argument("--world-size", type=int, metavar="N", help="how many processes train together")
    group.add_argument(
        "--master",
        metavar="HOST:PORT",
        help="where rank 0 listens: a host that all reach and a free port on it, as in 127.0.0.1:29500",
    )
    return parser


def read_run_folder(environ: Mapping[str, str]) -> RunFolder | None:
    """Where the run keeps its files; None under another launcher, or none."""
    given = environ.get(RUN_VARIABLE)
    return RunFolder(Path(given)) if given else None


def read_topology(
    environ: Mapping[str, str],
    *,
    rank: int | None = None,
    world_size: int | None = None,
    master: str | None = None,
) -> Topology:
    """Find this process's place from the arguments it was given and the environment it was started in.

    Raises `UsageError` when they are incomplete, contradict each other or make no sense.
    """
    settings = _settings(environ, rank=rank, world_size=world_size, master=master)
    # Inside a task of srun, torchrun starts ranks of its own; what it says is nearer to us.
    step = None if "RANK" in environ else _read_step(environ)
    # A step of one task is often just a shell on a node, from which ranks may be started by hand.
    if step is not None and (rank is None or step.size > 1):
        return _world_of_step(step, settings)
    if settings:
        return _world_of_settings(settings, environ)
    return _alone()


def leader_host(environ: Mapping[str, str]) -> str:
    """Where rank 0 listens, as far as the environment says; "" for ranks that met in another way."""
    return environ.get("MASTER_ADDR", "")


@dataclass(frozen=True)
class _Setting:
    """A value under the name by which its user knows it: `--rank` or `RANK`."""

    name: str
    value: str

    def number(self, lowest: int, highest: int | None = None, because: str = "") -> int:
        """The value as a whole number in a range, or an error that says what is wrong with it."""
        number = int(self.value) if re.fullmatch(r"[0-9]{1,18}", self.value) else -1
        if number < lowest or (highest is not None and number > highest):
            bounds = f"from {lowest} up" if highest is None else f"from {lowest} to {highest}"
            raise UsageError(f"{self.name} is {self.value!r}; it must be a whole number {bounds}{because}.")
        return number


def _settings(
    environ: Mapping[str, str], *, rank: int | None, world_size: int | None, master: str | None
) -> dict[str, _Setting]:
    """What arguments and variables say, by variable; they must agree where both speak."""
    given: dict[str, str] = {}
    if rank is not None:
        given["RANK"] = str(rank)
    if world_size is not None:
        given["WORLD_SIZE"] = str(world_size)
    if master is not None:
        given["MASTER_ADDR"], given["MASTER_PORT"] = _split_master(master)

    names = (*SIZES, *MASTER, *PLACE, "GROUP_WORLD_SIZE")
    settings = {name: _Setting(name, environ[name]) for name in names if name in environ}
    for name, value in given.items():
        argument = ARGUMENT_OF[name]
        if name in settings and settings[name].value != value:
            raise UsageError(
                f"{argument} gives {name} as {value}, but the environment has {name}={settings[name].value}; "
                f"leave out {argument} under a launcher, or unset {name}."
            )
        settings[name] = _Setting(argument, value)
    return settings


def _split_master(master: str) -> tuple[str, str]:
    match = re.fullmatch(r"\[([^\[\]\s]+)\]:([0-9]+)|([^:\[\]\s]+):([0-9]+)", master)
    if match is None:
        raise UsageError(
            f"--master is {master!r}; it must be a host and a port, as in 127.0.0.1:29500 or [::1]:29500."
        )
    return (match[1] or match[3], match[2] or match[4])


def _require_all(settings: Mapping[str, _Setting], names: tuple[str, ...]) -> None:
    """Refuse half a description: the missing half would have to be guessed."""
    missing = [ARGUMENT_OF.get(name, name) for name in names if name not in settings]
    if missing:
        there = ", ".join(dict.fromkeys(f"{setting.name}={setting.value}" for setting in settings.values()))
        raise UsageError(
            f"{there} is given, but not {' and '.join(dict.fromkeys(missing))}; "
            "give all of them, or none to run as one rank alone."
        )


def _world_of_settings(settings: Mapping[str, _Setting], environ: Mapping[str, str]) -> Topology:
    _require_all(settings, SIZES)
    size = settings["WORLD_SIZE"].number(1)
    rank = settings["RANK"].number(0, size - 1, f" ({settings['WORLD_SIZE'].name} is {size})")

    host, port = LOOPBACK, 0
    if size > 1 or any(name in settings for name in MASTER):
        _require_all(settings, MASTER)
        host, port = _host(settings["MASTER_ADDR"]), settings["MASTER_PORT"].number(1, 65535)

    local_rank, local_size, node, nodes = rank, size, 0, 1
    if any(name in settings for name in PLACE):
        local_rank, local_size, node, nodes = _place(settings, rank, size)

    launcher: Launcher = "hand"
    run_id = f"hand-{host}-{port}" if port else f"hand-{os.getpid()}"
    if "RANK" in environ and RUN_VARIABLE in environ:
        launcher, run_id = "dure", environ[RUN_VARIABLE]
    elif "RANK" in environ and "TORCHELASTIC_RUN_ID" in environ:
        # torchrun's own id is "none" unless its user gave one; the address of rank 0 tells two runs apart.
        launcher, run_id = "torchrun", f"torchrun-{environ['TORCHELASTIC_RUN_ID']}-{host}-{port}"
    return Topology(rank, size, local_rank, local_size, node, nodes, host, port, launcher, run_id)


def _place(settings: Mapping[str, _Setting], rank: int, size: int) -> tuple[int, int, int, int]:
    """This rank's number on its node, the ranks there, the node's number, the nodes."""
    _require_all(settings, PLACE)
    local_size = settings["LOCAL_WORLD_SIZE"].number(1, size)
    local_rank = settings["LOCAL_RANK"].number(0, min(local_size - 1, rank))
    if "GROUP_WORLD_SIZE" in settings:
        nodes = settings["GROUP_WORLD_SIZE"].number(1, size)
    elif size % local_size == 0:
        nodes = size // local_size
    else:
        raise UsageError(
            f"WORLD_SIZE={size} does not divide by LOCAL_WORLD_SIZE={local_size}, so the number of nodes is "
            "unknown; set GROUP_WORLD_SIZE to it."
        )
    node = settings["GROUP_RANK"].number(0, nodes - 1)
    others = size - local_size
    if (nodes == 1 and others > 0) or others < nodes - 1:
        raise UsageError(
            f"LOCAL_WORLD_SIZE={local_size} ranks here and {nodes} nodes (GROUP_WORLD_SIZE) cannot make "
            f"WORLD_SIZE={size}; correct the one that is wrong."
        )
    if nodes == 1 and local_rank != rank:
        raise UsageError(f"LOCAL_RANK={local_rank} but RANK={rank}; on a single node they are the same.")
    return local_rank, local_size, node, nodes


def _host(setting: _Setting) -> str:
    if not setting.value or re.search(r"\s", setting.value):
        raise UsageError(f"{setting.name} is {setting.value!r}; it must be the host where rank 0 listens.")
    return setting.value


def _alone() -> Topology:
    return Topology(0, 1, 0, 1, 0, 1, LOOPBACK, 0, "alone", f"alone-{os.getpid()}")


@dataclass(frozen=True)
class _Step:
    """A step of srun, as one of its tasks sees it."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    hosts: list[str]
    job_id: int
    step_id: int
    first_host_has_rank_0: bool


def _read_step(environ: Mapping[str, str]) -> _Step | None:
    """The step in which this process is a task, or None outside of srun.

    A batch script has SLURM_PROCID=0 and SLURM_NTASKS too, and yet it is one process: only the SLURM_STEP_
    variables tell a task.
    """
    if "SLURM_STEP_NUM_TASKS" not in environ:
        return None

    def setting(name: str) -> _Setting:
        if name not in environ:
            raise UsageError(
                f"SLURM_STEP_NUM_TASKS={environ['SLURM_STEP_NUM_TASKS']} is set, but not {name}; "
                "pass on all SLURM_ variables of the task, or none to run as one rank alone."
            )
        return _Setting(name, environ[name])

    step_id = setting("SLURM_STEP_ID").number(0)
    if step_id >= FIRST_SPECIAL_STEP:
        return None
    size = setting("SLURM_STEP_NUM_TASKS").number(1)
    rank = setting("SLURM_PROCID").number(0, size - 1, f" (SLURM_STEP_NUM_TASKS is {size})")
    hosts = expand_hosts(setting("SLURM_STEP_NODELIST").value)
    counts = expand_counts(setting("SLURM_STEP_TASKS_PER_NODE").value)
    if len(hosts) != len(counts) or sum(counts) != size:
        raise UsageError(
            f"SLURM_STEP_NODELIST={environ['SLURM_STEP_NODELIST']} ({len(hosts)} nodes) and "
            f"SLURM_STEP_TASKS_PER_NODE={environ['SLURM_STEP_TASKS_PER_NODE']} ({len(counts)} nodes, "
            f"{sum(counts)} tasks) do not fit SLURM_STEP_NUM_TASKS={size}; start this with srun again."
        )
    node = setting("SLURM_NODEID").number(0, len(hosts) - 1)
    _refuse_left_over_step(environ, size, counts[node])
    return _Step(
        rank=rank,
        size=size,
        local_rank=setting("SLURM_LOCALID").number(0, min(counts[node] - 1, rank)),
        local_size=counts[node],
        node=node,
        hosts=hosts,
        job_id=setting("SLURM_JOB_ID").number(0),
        step_id=step_id,
        # Block, cyclic and plane begin on the first node. A host file may begin anywhere.
        first_host_has_rank_0=environ.get("SLURM_DISTRIBUTION", "") != "arbitrary",
    )


def _refuse_left_over_step(environ: Mapping[str, str], size: int, local_size: int) -> None:
    """Refuse the variables of a step that this process is not in.

    `sbatch` and `salloc`, called from inside a step, hand its SLURM_STEP_ variables on to the new job, whose
    one process would wait for ranks that nobody starts. But they set SLURM_NTASKS, and sbatch SLURM_GTIDS.
    """
    tasks = environ.get("SLURM_NTASKS", str(size))
    ids_here = environ.get("SLURM_GTIDS")
    if size > 1 and (tasks != str(size) or (ids_here and len(ids_here.split(",")) != local_size)):
        raise UsageError(
            f"SLURM_STEP_NUM_TASKS={size}, with {local_size} here, does not fit SLURM_NTASKS={tasks} and "
            f"SLURM_GTIDS={ids_here}: it is left over from the step that submitted this job; start the ranks "
            "with srun, or unset SLURM_STEP_NUM_TASKS to run as one rank alone."
        )


def _world_of_step(step: _Step, settings: Mapping[str, _Setting]) -> Topology:
    expected = {
        "RANK": step.rank,
        "WORLD_SIZE": step.size,
        "LOCAL_RANK": step.local_rank,
        "LOCAL_WORLD_SIZE": step.local_size,
        "GROUP_RANK": step.node,
        "GROUP_WORLD_SIZE": len(step.hosts),
    }
    for name, value in expected.items():
        given = settings.get(name)
        if given is not None and given.value != str(value):
            raise UsageError(
                f"{given.name} is {given.value}, but srun started this as task {step.rank} of {step.size}, "
                f"so {name} is {value}; leave {given.name} to srun."
            )
    if step.size == 1:
        return _alone()  # nobody to meet, and several such may run from one shell
    if "MASTER_ADDR" in settings:
        host = _host(settings["MASTER_ADDR"])
    elif step.first_host_has_rank_0:
        host = step.hosts[0]
    else:
        raise UsageError(
            "SLURM_DISTRIBUTION is 'arbitrary', so only the host file tells where rank 0 is; "
            "set MASTER_ADDR to its first host."
        )
    # All tasks must come to one port without a word between them, and neighbouring jobs to another.
    port = 20000 + (step.job_id * 31 + step.step_id) % 10000
    if "MASTER_PORT" in settings:
        port = settings["MASTER_PORT"].number(1, 65535)
    place = (step.rank, step.size, step.local_rank, step.local_size, step.node, len(step.hosts))
    return Topology(*place, host, port, "srun", run_id=f"slurm-{step.job_id}.{step.step_id}")
