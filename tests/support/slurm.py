"""A real Slurm on one machine, for tests: munged, slurmctld and two slurmd, all under one temporary folder.

    with SlurmCluster() as cluster:
        done = cluster.srun(["hostname"], ntasks=4, nodes=2)     # prints node0 and node1

Each slurmd has host and mount names of its own (UTS and mount namespaces), so that a task's host name is its
node's name, and node names resolve as they do on a cluster, without a change to this machine's /etc/hosts.
Network, process ids and /dev/shm are shared: the nodes are two names for one machine.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import psutil  # type: ignore[import-untyped]

from dure.tools.bench.ports import free_ports
from support.processes import end_daemons, find, kill_with_children

Found = TypeVar("Found")

# The daemons are in sbin, which is not on everybody's PATH.
SEARCH_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo", "scontrol", "unshare", "setpriv")
ENDED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"}
    | {"NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"}
)
"""Job states that nothing follows. A requeued job is PENDING again, and is not among them."""

START_SECONDS = 180.0
STOP_SECONDS = 60.0
COMMAND_SECONDS = 240.0

CONFIGURATION = Path(__file__).with_name("slurm.conf.template")


class SlurmError(Exception):
    """Slurm did not do what a test asked; the message ends with what its daemons logged."""


@dataclass(frozen=True)
class Job:
    """What the controller says of a job."""

    id: int
    state: str
    exit_code: int
    signal: int
    restarts: int
    reason: str


def why_not_here() -> str | None:
    """Say why this machine cannot run the cluster, or None when it can."""
    if os.geteuid() != 0:
        return "a Slurm of our own needs root"
    missing = [name for name in PROGRAMS if shutil.which(name, path=SEARCH_PATH) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (tools/system-packages installs slurm-wlm and munge)"
    allowed = subprocess.run(
        ["unshare", "--mount", "--uts", "true"], capture_output=True, text=True, timeout=60, check=False
    )
    if allowed.returncode != 0:
        return f"this machine refuses mount and UTS namespaces: {allowed.stderr.strip()}"
    return None


class SlurmCluster:
    """Two nodes of several processors each, from `with` to the end of its block."""

    def __init__(self, *, nodes: int = 2, cpus_per_node: int = 8) -> None:
        self.node_names = tuple(f"node{index}" for index in range(nodes))
        self._ports = free_ports(1 + nodes)
        # Not pytest's own folder: a socket's path has at most 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="dure-slurm-"))
        self._configuration = self.folder / "slurm.conf"
        self._cpus_per_node = cpus_per_node
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._namespaces: list[int] = []

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which Slurm's commands speak to this cluster and no other."""
        return {**self.outside_environment(), "SLURM_CONF": str(self._configuration)}

    @staticmethod
    def outside_environment() -> dict[str, str]:
        """This process's environment as it would be outside any Slurm job."""
        # A test run inside a job of a real cluster must not look like a step of that job.
        ours = ("SLURM", "SRUN_", "SBATCH_", "SALLOC_")
        return {name: value for name, value in os.environ.items() if not name.startswith(ours)}

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def command(
        self,
        *words: str,
        stdin: str = "",
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        deadline_seconds: float = COMMAND_SECONDS,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the cluster's environment, and return whatever its exit code is."""
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd or self.folder,
            env={**self.environment, **(environment or {})},
        )
        try:
            out, err = process.communicate(stdin, timeout=deadline_seconds)
        except subprocess.TimeoutExpired:
            # srun ends its step when it is asked to end; killed at once it would leave the tasks running.
            process.terminate()
            try:
                out, err = process.communicate(timeout=STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
            raise SlurmError(
                f"`{' '.join(words)}` did not end in {deadline_seconds:g} s.\n"
                f"stdout: {out[-2000:]}\nstderr: {err[-2000:]}\n{self._log_tails()}"
            ) from None
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def srun(
        self,
        args: Sequence[str],
        ntasks: int,
        nodes: int,
        *,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        deadline_seconds: float = COMMAND_SECONDS,
    ) -> subprocess.CompletedProcess[str]:
        """Run `args` as a job step of its own and wait for it; the caller judges the exit code.

        Slurm fills the first node first: 4 tasks on 2 nodes are 3 and 1. `--ntasks-per-node` spreads them.
        """
        return self.command(
            "srun",
            f"--nodes={nodes}",
            f"--ntasks={ntasks}",
            *options,
            *args,
            environment=environment,
            cwd=cwd,
            deadline_seconds=deadline_seconds,
        )

    def sbatch(
        self,
        script: str,
        *options: str,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> int:
        """Submit a script's text, `#!` line included; `output` of the returned id is what it prints."""
        done = self.command(
            "sbatch",
            "--parsable",
            f"--output={self.folder}/job-%j.out",
            "--open-mode=append",  # a requeued job adds to what its first attempt printed
            *options,
            stdin=script,
            environment=environment,
            cwd=cwd,
        )
        if done.returncode != 0:
            raise SlurmError(f"sbatch refused the script: {done.stderr.strip()}\n{self._log_tails()}")
        return int(done.stdout.split(";")[0])

    def output(self, job_id: int) -> str:
        """What a job of `sbatch` has printed so far."""
        path = self.folder / f"job-{job_id}.out"
        return path.read_text() if path.exists() else ""

    def job(self, job_id: int) -> Job:
        """The controller's present view of a job."""
        done = self.command("scontrol", "show", "job", "--oneliner", str(job_id))
        if done.returncode != 0:
            raise SlurmError(f"the controller does not know job {job_id}: {done.stderr.strip()}")
        fields = dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)
        exit_code, _, number = fields["ExitCode"].partition(":")
        return Job(
            id=job_id,
            state=fields["JobState"],
            exit_code=int(exit_code),
            signal=int(number),
            restarts=int(fields["Restarts"]),
            reason=fields["Reason"],
        )

    def wait(self, job_id: int, deadline_seconds: float, states: frozenset[str] = ENDED) -> Job:
        """Wait until the job is in one of `states`, by default until it has ended, and return it."""

        def reached() -> Job | None:
            job = self.job(job_id)
            if job.state in states:
                return job
            if job.state in ENDED:
                raise SlurmError(
                    f"the job ended before it was {' or '.join(sorted(states))}. "
                    f"{self._story(job_id)}\n{self._log_tails()}"
                )
            return None

        what = f"job {job_id} to be {' or '.join(sorted(states))}"
        return self._until(reached, deadline_seconds, what, lambda: self._story(job_id))

    def wait_for_output(self, job_id: int, text: str, deadline_seconds: float) -> None:
        """Wait until a job of `sbatch` has printed `text`: then it is past the line that prints it."""
        self._until(
            lambda: text in self.output(job_id) or None,
            deadline_seconds,
            f"job {job_id} to print {text!r}",
            lambda: self._story(job_id),
        )

    def _story(self, job_id: int) -> str:
        return f"{self.job(job_id)} printed: {self.output(job_id)[-2000:]}"

    def processes(self) -> list[psutil.Process]:
        """All living processes of this cluster: daemons, step managers, tasks, commands."""
        # A step manager overwrites its environment with its title, and a task can drop its own; but nothing
        # that a slurmd started is outside its UTS namespace. Commands are, and carry our SLURM_CONF.
        inside = {os.fstat(namespace).st_ino for namespace in self._namespaces}
        return find(
            lambda process: (
                Path(f"/proc/{process.pid}/ns/uts").stat().st_ino in inside
                or process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]
            )
        )

    # Starting and stopping

    def _start(self) -> None:
        self._write_files()
        self._daemon(
            "munged",
            # Forced, because munged dislikes a socket that other users cannot reach, and here none should.
            ["munged", "--foreground", "--force"]
            + [f"--{file}-file={self.folder}/munge.{file}" for file in ("key", "pid", "seed", "log")]
            + [f"--socket={self.folder}/munge.socket"],
        )
        self._until_up("munged to listen", (self.folder / "munge.socket").exists)
        self._daemon("slurmctld", ["slurmctld", "-D"])
        for name in self.node_names:
            self.start_node(name)
        self._until_up("all nodes to be idle", self._all_nodes_are_idle)

    def daemon(self, name: str) -> subprocess.Popen[bytes]:
        """A node's slurmd, or another daemon."""
        return self._daemons[name]

    def start_node(self, name: str) -> None:
        """Start a node's slurmd; when it is registered, jobs can run there."""
        # The namespaces end with the processes in them, so there is nothing to undo.
        enter = 'hostname "$1" && mount --bind "$2" /etc/hosts && exec slurmd -D -N "$1"'
        namespaces = ["unshare", "--mount", "--uts"]
        self._daemon(name, [*namespaces, "sh", "-c", enter, "sh", name, f"{self.folder}/hosts-{name}"])
        ours, its = (Path(f"/proc/{process}/ns/uts") for process in ("self", self.daemon(name).pid))
        self._until_up(f"{name} to be by itself", lambda: its.stat().st_ino != ours.stat().st_ino)
        # Held open, so that the kernel cannot give the namespace's number to another one while we go by it.
        self._namespaces.append(os.open(its, os.O_RDONLY))

    def _write_files(self) -> None:
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        (self.folder / "plugstack.conf").touch()
        # Or slurmd would look for the machine's kind of cgroups, and fail where there is none.
        # The version 1 plugin does nothing until another plugin asks, and none here does.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        for name in ("state", *(f"spool-{node}" for node in self.node_names)):
            (self.folder / name).mkdir()
        for name in self.node_names:
            # Its own name first: that is what its address is turned back into. One address for all: srun
            # listens on its host's, and is called back on the one from which its calls seem to come.
            names = " ".join([name, "localhost", *self.node_names])
            (self.folder / f"hosts-{name}").write_text(f"127.0.0.1 {names}\n{Path('/etc/hosts').read_text()}")
        control_port, *node_ports = self._ports
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} "
            f"CPUs={self._cpus_per_node} RealMemory=16384 State=UNKNOWN"
            for name, port in zip(self.node_names, node_ports, strict=True)
        )
        self._configuration.write_text(
            CONFIGURATION.read_text().format(
                host=socket.gethostname().split(".")[0],
                control_port=control_port,
                first_job=random.randrange(1, 50_000),
                folder=self.folder,
                nodes=nodes,
            )
        )

    def _daemon(self, name: str, words: Sequence[str]) -> None:
        with (self.folder / f"{name}.stderr").open("wb") as log:
            self._daemons[name] = subprocess.Popen(
                # A test run that is killed takes its daemons along.
                ["setpriv", "--pdeathsig", "TERM", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={**self.environment, "PATH": SEARCH_PATH},
            )

    def _all_nodes_are_idle(self) -> bool:
        done = self.command("sinfo", "--noheader", "--Node", "--format=%N %T", deadline_seconds=START_SECONDS)
        states = dict(line.split() for line in done.stdout.splitlines())
        return states == dict.fromkeys(self.node_names, "idle")

    def _until_up(self, what: str, condition: Callable[[], bool]) -> None:
        def up() -> bool | None:
            for name, process in self._daemons.items():
                if process.poll() is not None:
                    raise SlurmError(f"{name} ended with {process.returncode}.\n{self._log_tails()}")
            return condition() or None

        self._until(up, START_SECONDS, what)

    def _until(
        self,
        reached: Callable[[], Found | None],
        deadline_seconds: float,
        what: str,
        story: Callable[[], str] = lambda: "",
    ) -> Found:
        """Poll until `reached` returns something; when the time is over, say what was waited for and why."""
        deadline = time.monotonic() + deadline_seconds
        while (found := reached()) is None:
            if time.monotonic() > deadline:
                raise SlurmError(f"waited {deadline_seconds:g} s for {what}. {story()}\n{self._log_tails()}")
            time.sleep(0.05)
        return found

    def _stop(self) -> None:
        """End everything that this cluster started, by process id, and remove its folder."""
        # Controller and nodes first, so that nothing new starts; munged last: the others speak through it.
        munged = self._daemons.pop("munged", None)
        end_daemons(list(self._daemons.values()), STOP_SECONDS)
        self._kill_tasks(spare=munged)
        if munged is not None:
            end_daemons([munged], STOP_SECONDS)
        for namespace in self._namespaces:
            os.close(namespace)
        self._namespaces.clear()
        shutil.rmtree(self.folder)

    def _kill_tasks(self, spare: subprocess.Popen[bytes] | None) -> None:
        """Kill step managers and tasks, which outlive a slurmd by design."""
        deadline = time.monotonic() + STOP_SECONDS
        while left := [task for task in self.processes() if spare is None or task.pid != spare.pid]:
            if time.monotonic() > deadline:
                raise SlurmError(f"these processes outlived SIGKILL by {STOP_SECONDS:g} s: {left}")
            kill_with_children(left)
            psutil.wait_procs(left, timeout=1)

    def _log_tails(self, lines: int = 15) -> str:
        """The last lines of every daemon's log, for an error message."""
        tails = []
        for path in sorted([*self.folder.glob("*.log"), *self.folder.glob("*.stderr")]):
            last = path.read_text(errors="replace").splitlines()[-lines:]
            tails.append("\n".join([f"--- {path.name}", *last]))
        return "\n".join(tails)
