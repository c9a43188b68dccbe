"""Ray's nodes as `Machines`, and `dure train --engine ray`."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dure.base.errors import UsageError
from dure.base.say import printable
from dure.base.team_key import TeamKey
from dure.config import LoadedJob
from dure.engine.agent_process import PASSED_ON
from dure.engine.node_start import NodeStart
from dure.engine.ray.actor import AgentActor
from dure.engine.ray.agent import RayAgent
from dure.engine.ray.places import Bundles, Place, Places, alive_nodes
from dure.engine.supervisor import Supervisor, Wanted, passed_on

_NO_LOGS: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
"""What agents print comes over the actors' answers, in order and with nothing lost at the end."""


@dataclass(frozen=True)
class RayMachines:
    """The nodes of a run, `node0` to the last: each is wherever Ray has placed its bundle."""

    names: tuple[str, ...]
    places: Places
    lost_seconds: float
    python: str | None
    folder: str

    def trouble(self, names: Sequence[str], seconds: float) -> dict[str, str]:
        """The nodes that Ray has no place for."""
        there = self._there()
        return {name: "Ray has no place for it yet" for name in names if name not in there}

    def way_out(self, name: str) -> str:
        """Where to look when Ray has no place."""
        return "`ray status` shows what Ray has, and what it waits for"

    def address(self, name: str) -> str:
        """The address by which Ray's nodes reach that one."""
        return str(alive_nodes()[self._there()[name].node_id]["NodeManagerAddress"])

    def start(
        self, name: str, start: NodeStart, key: TeamKey, *, out: Callable[[str], None] | None
    ) -> RayAgent:
        """Start an actor in the node's bundle, and in it the agent."""
        place = self._there().get(name)
        if place is None:
            raise UsageError(f"{name} has lost its place in Ray; start the run again")
        each = self.places.bundles.each
        actor: Any = (
            ray.remote(AgentActor)
            .options(
                num_cpus=each["CPU"],
                num_gpus=each.get("GPU", 0),
                resources={kind: amount for kind, amount in each.items() if kind not in ("CPU", "GPU")},
                scheduling_strategy=PlacementGroupSchedulingStrategy(place.group, place.bundle),
                max_restarts=0,
                max_task_retries=0,
            )
            .remote()
        )
        environ = {kept: os.environ[kept] for kept in PASSED_ON if kept in os.environ}
        began = actor.begin.remote(self.python, self.folder, environ, start.to_line(), key)
        is_dead = partial(_is_dead, place.node_id)
        return RayAgent(actor, began, name, passed_on(name, out), is_dead, self.lost_seconds)

    def close(self) -> None:
        """Give Ray its bundles back."""
        with contextlib.suppress(Exception):  # Ray itself may be gone
            self.places.give_back()

    def _there(self) -> dict[str, Place]:
        return {self.names[number]: place for number, place in self.places.now().items()}


def _is_dead(node_id: str) -> bool:
    return node_id not in alive_nodes()


def train_on_ray(start: NodeStart, out: Callable[[str], None] = print) -> Path:
    """Train a job on Ray's nodes; returns the run's folder. `out` takes what the leader prints on standard output."""
    loaded = start.loaded
    if start.run_dir is None and "://" in loaded.storage:
        raise UsageError(
            "the storage is a bucket: give --run-dir, a folder that all of Ray's nodes see at the same path"
        )
    run = (start.run_dir or loaded.run_in_storage(time.strftime("%Y%m%d-%H%M%S"))).absolute()
    with connected(loaded.job.ray.address):
        places = Places(bundles_of(loaded, run.name))
        try:
            places.take(lambda: None)
        except BaseException:
            places.give_back()
            raise
        cluster = loaded.job.cluster
        machines = RayMachines(
            tuple(f"node{number}" for number in range(cluster.nodes)),
            places,
            cluster.lost_seconds,
            cluster.python,
            os.getcwd(),
        )
        Supervisor(machines, Wanted.of(replace(start, run_dir=run)), out).run()
    return run


def command_on_ray(start: NodeStart) -> None:
    """As `dure train`: standard output has the summary and nothing else, whatever Ray prints there about its nodes."""
    stdout = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        train_on_ray(start, lambda line: print(line, file=stdout, flush=True))


def bundles_of(loaded: LoadedJob, name: str) -> Bundles:
    """What a job asks of Ray."""
    job = loaded.job
    each: dict[str, float] = {"CPU": job.team.ranks * (job.ray.cpus_per_rank or job.team.threads)}
    if job.ray.gpus_per_node:
        each["GPU"] = job.ray.gpus_per_node
    for kind, amount in job.ray.resources.items():
        if kind in ("CPU", "GPU", "memory", "object_store_memory"):
            raise UsageError(f"ray.resources has {kind}; set ray.cpus_per_rank and ray.gpus_per_node instead")
        each[kind] = amount
    return Bundles(
        name=f"dure {re.sub(r'[^A-Za-z0-9._-]', '-', name)}",
        each=each,
        most=job.cluster.nodes,
        fewest=job.cluster.min_nodes or job.cluster.nodes,
        strategy=job.ray.strategy,
        wait_seconds=job.ray.wait_seconds,
    )


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Ray, as this process is connected with it already, or for as long as the block lasts."""
    if ray.is_initialized():
        yield
        return
    given = address or os.environ.get("RAY_ADDRESS")
    try:
        # Client mode (ray://) knows only some of the arguments.
        ray.init(given or "auto", **({} if str(given).startswith("ray://") else _NO_LOGS))
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"there is no Ray at {printable(given or 'this machine', 100)} ({printable(str(error), 200)}); start one "
            "with `ray start --head`, or say where it is: --ray-address HOST:PORT, ray.address, or RAY_ADDRESS"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()
