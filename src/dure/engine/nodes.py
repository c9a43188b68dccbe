"""The nodes of a run: what the command line and the job say of them, and a script on several."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dure.base.errors import UsageError
from dure.base.in_image import digest_inside
from dure.base.run_folder import RunFolder
from dure.base.say import say
from dure.base.team_key import TeamKey
from dure.config import Cluster, LoadedJob
from dure.launch import LaunchSpec, run_script
from dure.launch.lease import Lease
from dure.launch.nodes.address import split_leader
from dure.launch.nodes.join import Nodes, join
from dure.launch.restart_policy import Restart
from dure.launch.script import say_restart
from dure.launch.stop import StopSignals
from dure.launch.team import record_restart

if TYPE_CHECKING:
    from dure.launch.nodes.messages import Team


def nodes_of(loaded: LoadedJob, node_rank: int | None, leader: str | None) -> Nodes | None:
    """What the command line and the job say of the nodes; None for a run on this machine alone."""
    cluster, team = loaded.job.cluster, loaded.job.team
    if node_rank is None and leader is None:
        if cluster.nodes > 1:
            raise UsageError(
                f"the job wants {cluster.nodes} nodes: start it on each with --node-rank 0 (1, …) and --leader "
                "ADDRESS:PORT of node 0, or with --hosts, or with `dure submit`; --nodes 1 trains on this machine alone"
            )
        return None
    node, host, port = _which(cluster.nodes, node_rank, leader)
    return Nodes(
        count=cluster.nodes,
        fewest=cluster.min_nodes or cluster.nodes,
        node=node,
        leader=host,
        port=port,
        ranks=team.ranks,
        interface=cluster.interface,
        join_seconds=cluster.join_seconds,
        lost_seconds=cluster.lost_seconds,
        max_restarts=team.max_restarts,
        facts=_facts(loaded),
        tls=cluster.tls,
    )


def nodes_of_script(target: str, count: int, node_rank: int | None, leader: str | None, ranks: int) -> Nodes:
    """What the command line says of the nodes that a script runs on."""
    node, host, port = _which(count, node_rank, leader)
    path = Path(target)
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else target
    cluster = Cluster()
    return Nodes(
        count=count,
        fewest=count,
        node=node,
        leader=host,
        port=port,
        ranks=ranks,
        interface=None,
        join_seconds=cluster.join_seconds,
        lost_seconds=cluster.lost_seconds,
        max_restarts=0,
        facts={"script (sha256)": digest, **_versions()},
        is_job=False,
    )


def run_script_on_nodes(
    target: str,
    argv: list[str],
    folder: RunFolder,
    nodes: Nodes,
    key: TeamKey,
    *,
    module: bool,
    cold: bool,
    spec: LaunchSpec,
) -> int:
    """This node's ranks of a script that runs on several; every node keeps its own logs. `spec` is what it has in
    common with a script on one."""
    lease = Lease()
    nodes = replace(nodes, max_restarts=spec.max_restarts, script=spec.script)
    with StopSignals() as stop, join(nodes, key, lease, lambda: folder.path, say, stop.check) as joined:

        def tell(formed: Team) -> None:
            if nodes.leads:
                say(formed.where)

        def tell_news() -> None:
            while not joined.news.empty():
                news = joined.news.get_nowait()
                if isinstance(news, Restart):
                    record_restart(folder, news)
                    say_restart(news)
                else:
                    say(news)

        try:
            spec = replace(spec, joined=joined, on_team=tell, on_tick=tell_news)
            return run_script(target, argv, spec, module=module, cold=cold)
        finally:
            tell_news()


def _which(count: int, node_rank: int | None, leader: str | None) -> tuple[int, str, int]:
    """(this node, the leader's host, its port), or what is missing."""
    if node_rank is None or leader is None:
        given, missing = ("--leader", "--node-rank") if node_rank is None else ("--node-rank", "--leader")
        raise UsageError(f"{given} is given, but not {missing}; a run on several nodes needs both")
    if not 0 <= node_rank < count:
        raise UsageError(
            f"--node-rank is {node_rank}, but there are {count} nodes (--nodes): use 0 to {count - 1}"
        )
    return node_rank, *split_leader(leader)


def _facts(loaded: LoadedJob) -> dict[str, str]:
    """What all nodes must have alike. The recipe, which the ranks compare, has the rest."""
    job = loaded.job.model_dump_json(exclude={"cluster", "slurm", "ray", "kubernetes"})
    return {"job (sha256)": hashlib.sha256(job.encode()).hexdigest(), **_versions()}


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "dure": importlib.metadata.version("dure"),
        "image (sha256)": digest_inside() or "none",
    }
