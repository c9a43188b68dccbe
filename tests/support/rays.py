"""A real Ray of several nodes on this machine, on loopback only."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from support.leftovers import all_gone, wait_until
from support.nodes_stories import Started

ADDRESS = "127.0.0.2"
"""A loopback address that Ray does not take for another one, as it does with 127.0.0.1."""
_STORE_BYTES = 80 * 1024 * 1024
_QUICK = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 10_000,
    "health_check_failure_threshold": 3,
}


class Here:
    """A place like those of a lab, but this machine."""

    def command(self, place, words):
        return words


class Rays:
    """A Ray of nodes with two CPUs each; its head has none."""

    def __init__(self):
        from ray.cluster_utils import Cluster

        # Short: the paths of Ray's sockets are in it.
        self.folder = Path(tempfile.mkdtemp(prefix="dure-ray-", dir="/tmp"))
        self.family_before = set(psutil.Process().children(recursive=True))
        head = {
            **self._of_all(0),
            "include_dashboard": False,
            "temp_dir": str(self.folder),
            "_system_config": _QUICK,
        }
        self.cluster = _patiently(lambda: Cluster(initialize_head=True, head_node_args=head))

    def _of_all(self, cpus):
        return {"num_cpus": cpus, "node_ip_address": ADDRESS, "object_store_memory": _STORE_BYTES}

    @property
    def address(self):
        return self.cluster.address

    def add_node(self):
        return _patiently(lambda: self.cluster.add_node(**self._of_all(2), temp_dir=str(self.folder)))

    def kill(self, node):
        """SIGKILL to the node's own processes; those that it has started are left to themselves."""
        self.cluster.remove_node(node, allow_graceful=False)

    def agents(self):
        """The agents that run on this Ray, by the raylet's process id; the leader's listens at Ray's address."""
        found = {}
        for process in psutil.process_iter(["cmdline"]):
            if (process.info["cmdline"] or [])[1:] == ["-m", "dure", "agent", "-"]:
                for parent in process.parents():
                    if parent.pid in self.raylets():
                        found[parent.pid] = process
        return found

    def raylets(self):
        """The nodes by their raylets' process ids."""
        return {node.all_processes["raylet"][0].process.pid: node for node in self.cluster.list_all_nodes()}

    def node_of(self, *, leader):
        """The node that the leader's agent is on, or another with an agent."""

        def find():
            for raylet, agent in self.agents().items():
                leads = any(
                    one.status == psutil.CONN_LISTEN and one.laddr.ip == ADDRESS
                    for one in agent.net_connections("tcp4")
                )
                if leads is leader:
                    return self.raylets()[raylet]
            return None

        return wait_until(find, "an agent on a node of Ray")

    def close(self):
        self.cluster.shutdown()
        all_gone(set(psutil.Process().children(recursive=True)) - self.family_before)
        shutil.rmtree(self.folder)


def _patiently(make):
    """Ray gives a node 30 s to start, and a busy machine needs more."""
    before = set(psutil.Process().children(recursive=True))
    for _ in range(4):
        try:
            return make()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
            for process in set(psutil.Process().children(recursive=True)) - before:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
    return make()


class RayRun(Started):
    """`dure train --engine ray`."""

    def __init__(self, rays, job, run, folder, *arguments):
        words = ["train", job, "--engine", "ray", "--ray-address", rays.address, "--run-dir", run, "--json"]
        super().__init__(Here(), "driver", [*words, *arguments], folder)


DRIVER = """
import json, sys
from dure.base.team_key import TeamKey
from dure.engine.ray import fit

key = TeamKey(bytes.fromhex(sys.argv[1]))
TeamKey.random = classmethod(lambda cls: key)
result = fit(sys.argv[2], ray_address=sys.argv[3], run_dir=sys.argv[4], nodes=2)
print(json.dumps({"sha256": result.weights_sha256, "loss": result.metrics["loss"], "path": str(result.path),
                  "ranks": result.summary["ranks"]}))
"""


class Driver:
    """A driver of a user's own, whose run has a key that is known here."""

    def __init__(self, secret, job, address, run, err):
        with err.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-", secret, job, address, run],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"},
            )
        self.process.stdin.write(DRIVER.encode())
        self.process.stdin.close()

    def result(self):
        out = self.process.stdout.read()
        self.process.stdout.close()
        assert self.process.wait(300) == 0
        return json.loads(out)

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(60)
        self.process.stdout.close()
