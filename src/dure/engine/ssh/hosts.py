"""Machines that are reached by ssh, and this one, for which none is needed."""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dure.base.errors import UsageError
from dure.base.team_key import TeamKey
from dure.engine.agent_process import PASSED_ON, AgentProcess
from dure.engine.supervisor import Supervisor, Wanted, passed_on
from dure.launch.nodes.address import interfaces

if TYPE_CHECKING:
    from dure.engine.node_start import NodeStart

_SSH_OPTIONS = (
    "-o",
    "BatchMode=yes",
    "-o",
    "ConnectTimeout=5",
    # A host that is gone is noticed in seconds, and a cable that is out for two of them does no harm.
    "-o",
    "ServerAliveInterval=2",
    "-o",
    "ServerAliveCountMax=3",
)


@dataclass(frozen=True)
class Host:
    """A host, and how it is reached."""

    name: str
    ssh: str
    here: bool
    """Whether it is this machine: then no ssh is needed."""

    def command(self, argv: Sequence[str], folder: str, environ: Mapping[str, str]) -> list[str]:
        """The local command line that runs `argv` there, in `folder`."""
        if self.here:
            return list(argv)
        kept = [f"{name}={environ[name]}" for name in PASSED_ON if name in environ]
        # ssh hands one string to the user's shell there: every word is quoted for it.
        there = f"cd {shlex.quote(folder)} && exec env {shlex.join([*kept, *argv])}"
        return [*shlex.split(self.ssh), *_SSH_OPTIONS, "--", self.name, there]


@dataclass(frozen=True)
class SshHosts:
    """The hosts of a job; the `Machines` of `dure train --hosts`."""

    hosts: tuple[Host, ...]
    python: str

    @property
    def names(self) -> tuple[str, ...]:
        """Of all hosts."""
        return tuple(host.name for host in self.hosts)

    @functools.cached_property
    def _by_name(self) -> dict[str, Host]:
        return {host.name: host for host in self.hosts}

    def trouble(self, names: Sequence[str], seconds: float) -> dict[str, str]:
        """Why each host that cannot be reached cannot; all are asked at once."""
        return answers([self._by_name[name] for name in names], seconds)

    def way_out(self, name: str) -> str:
        """What finds out more about a host that cannot be reached."""
        ssh = self.hosts[0].ssh
        return f"try `{ssh} {name} true`, or `dure doctor`"

    def address(self, name: str) -> str:
        """A host's name is what it is reached by."""
        return name

    def start(
        self, name: str, start: NodeStart, key: TeamKey, *, out: Callable[[str], None] | None
    ) -> AgentProcess:
        """Start an agent on a host."""
        argv = [self.python, "-m", "dure", "agent", "-"]
        command = self._by_name[name].command(argv, os.getcwd(), os.environ)
        return AgentProcess(command, start.to_line(), key, passed_on(name, out))

    def close(self) -> None:
        """Nothing is held."""


def known_hosts(names: Sequence[str], ssh: str) -> tuple[Host, ...]:
    """The hosts, and which of them is this machine."""
    own = {*interfaces().values(), "localhost"}
    return tuple(Host(name, ssh, here=name in own) for name in names)


def train_on_hosts(start: NodeStart) -> None:
    """Train on the job's hosts, an agent on each."""
    loaded, cluster = start.loaded, start.loaded.job.cluster
    if start.run_dir is None and "://" in loaded.storage:
        raise UsageError(
            "the storage is a bucket: give --run-dir, a folder that all hosts see at the same path"
        )
    run = (start.run_dir or loaded.run_in_storage(time.strftime("%Y%m%d-%H%M%S"))).absolute()
    hosts = SshHosts(known_hosts(cluster.hosts, cluster.ssh), cluster.python or sys.executable)
    Supervisor(hosts, Wanted.of(replace(start, run_dir=run))).run()


def answers(hosts: Sequence[Host], seconds: float) -> dict[str, str]:
    """Why each host that cannot be reached cannot; all are asked at once."""
    asked = {
        host.name: subprocess.Popen(
            host.command(["true"], "/", {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in hosts
        if not host.here
    }
    deadline = time.monotonic() + seconds
    trouble: dict[str, str] = {}
    for name, process in asked.items():
        try:
            _, told = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            if process.returncode != 0:
                trouble[name] = (
                    told.strip().splitlines()[-1] if told.strip() else f"exit code {process.returncode}"
                )
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            trouble[name] = f"no answer within {seconds:.0f} s"
    return trouble
