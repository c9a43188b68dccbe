"""`dure train --hosts a,b`: an agent on every host, all taken down together, all started again when they must."""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dure.base.errors import DureError, Resumable, UsageError
from dure.base.say import say
from dure.base.team_key import TeamKey
from dure.engine.node_start import STANDARD_INPUT, NodeStart
from dure.engine.ssh.attached import KILL, STOP
from dure.engine.ssh.remote import SSH_FAILED, Host, Remote, answers
from dure.launch.lease import LeaseOver
from dure.launch.nodes.address import interfaces
from dure.launch.stop import StopSignals

_LOOK_SECONDS = 0.1
_ANSWER_SECONDS = 8.0
_LAST_WORDS_SECONDS = 20.0
"""How long agents may take to notice that their leader is gone, and to end."""
_COME_BACK_SECONDS = 5.0
"""Between two looks whether a lost host is back."""
_LONG_SECONDS = 60.0
"""A run that lasted so long made progress: it may be started again as often as at first."""
_FIRST_PORT, _PORTS = 20000, 10000
_CUT_OFF = (SSH_FAILED, LeaseOver.exit_code)
"""How an agent ends whose host was lost, or that had lost us: neither is the run's failure."""


@dataclass(frozen=True)
class Wanted:
    """What is to run where."""

    hosts: tuple[Host, ...]
    fewest: int
    start: NodeStart
    """What every node is handed, but for its number and its leader."""
    python: str
    run: str
    max_restarts: int
    lost_seconds: float
    """An agent that has not heard of us for so long has ended by itself."""


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
    wanted = Wanted(
        hosts=known_hosts(cluster.hosts, cluster.ssh),
        fewest=cluster.min_nodes or cluster.nodes,
        start=replace(start, run_dir=run, attached=True),
        python=cluster.python or sys.executable,
        run=str(run),
        max_restarts=loaded.job.team.max_restarts,
        lost_seconds=cluster.lost_seconds,
    )
    Supervisor(wanted).run()


@dataclass
class Supervisor:
    """Starts agents and watches them. What the leader prints on standard output is printed here."""

    wanted: Wanted
    agents: dict[str, Remote] = field(default_factory=dict)
    attempt: int = 0
    _key: TeamKey = field(default_factory=TeamKey.random)
    """Another in each attempt: who is left of an earlier one does not come into it."""
    _stop: StopSignals = field(init=False)
    _asked_to_stop: bool = False

    def run(self) -> None:
        """Until the run is done. Raises what the command ends with otherwise."""
        tries = 0
        self._stop = StopSignals(self._ask_to_stop)
        with self._stop:
            try:
                leader = self.wanted.hosts[0]
                while True:
                    began = time.monotonic()
                    why, lost = self._run_once(leader)
                    if not why:
                        return
                    if self._asked_to_stop:
                        raise Resumable(
                            f"{why}. The run was asked to stop, so it is not started again; resumable: the same "
                            f"command with --run-dir {self.wanted.run} goes on from its newest checkpoint"
                        )
                    tries = 0 if time.monotonic() - began > _LONG_SECONDS else tries + 1
                    if tries > self.wanted.max_restarts:
                        raise Resumable(
                            f"{why}; started again {self.wanted.max_restarts} times without getting far. Resumable: "
                            f"the same command with --run-dir {self.wanted.run} goes on"
                        )
                    leader = self._next_leader(leader if lost else None)
                    say(f"{why}; starts again with {leader.name} as the leader")
            finally:
                self._end_all()

    def _run_once(self, leader: Host) -> tuple[str, bool]:
        """("", …) when the run is done; else why it is to be started again, and whether the leader was lost."""
        order = self._order(leader)
        trouble = answers(order, _ANSWER_SECONDS)
        for name, why in trouble.items():
            say(f"{name} cannot be reached: {why}")
        here = [host for host in order if host.name not in trouble]
        if len(here) < self.wanted.fewest and self.attempt == 0:
            raise UsageError(
                f"{', '.join(trouble)} cannot be reached by `{order[0].ssh}`, and at least {self.wanted.fewest} of the "
                f"hosts must be; try `{order[0].ssh} {next(iter(trouble))} true`, or `dure doctor`"
            )
        if len(here) < self.wanted.fewest or leader not in here:
            return f"{', '.join(trouble)} cannot be reached", leader not in here
        self.attempt += 1
        self._key = TeamKey.random()
        for host in here:
            self._start(host, order)
        retry_at = time.monotonic() + _COME_BACK_SECONDS
        given_up: set[str] = set()
        while True:
            self._stop.check()
            time.sleep(_LOOK_SECONDS)
            code = self.agents[leader.name].exit_code()
            if code is not None:
                return self._after_leader(leader, code)
            for host in order:
                agent = self.agents.get(host.name)
                if agent is not None and host is not leader and agent.exit_code() is not None:
                    self._forget(host, agent, given_up)
            if time.monotonic() > retry_at:
                self._bring_back(
                    [host for host in order if host.name not in {*self.agents, *given_up}], order
                )
                retry_at = time.monotonic() + _COME_BACK_SECONDS

    def _after_leader(self, leader: Host, code: int) -> tuple[str, bool]:
        cut_off = code in _CUT_OFF or code < 0
        if cut_off:
            self._end_all()  # without their leader, the others have nothing to save
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        codes = {name: agent.wait(deadline, self._stop.check) for name, agent in self.agents.items()}
        self._end_all()
        if code == 0:
            return "", False
        if self._asked_to_stop and (cut_off or code == Resumable.exit_code):
            saved = "stopped, and the leader is lost" if cut_off else "stopped and saved"
            raise Resumable(f"{saved}; the same command with --run-dir {self.wanted.run} goes on")
        if cut_off:
            if code == SSH_FAILED:
                # It may live, only cut off, and train on alone: until it notices that it has no supervisor.
                self._wait(self.wanted.lost_seconds)
            return f"the leader, {leader.name}, is lost", True
        if code == Resumable.exit_code:
            lost = [name for name, ended in codes.items() if ended not in (0, Resumable.exit_code)]
            return f"{', '.join(lost) or 'a node'} is lost", False
        raise _Ended(f"the run ended on {leader.name} with exit code {code}; see above for the cause", code)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._stop.check()
            time.sleep(_LOOK_SECONDS)

    def _forget(self, host: Host, agent: Remote, given_up: set[str]) -> None:
        code = agent.wait(time.monotonic() + 1.0)
        del self.agents[host.name]
        if code not in (0, Resumable.exit_code, *_CUT_OFF, None) and code is not None and 0 < code < 128:
            given_up.add(host.name)  # it said why, and would say it again
            say(f"the agent on {host.name} ended with exit code {code}, and is not started again")
        elif code != 0:
            say(f"{host.name} is lost; it is taken back when it answers")

    def _bring_back(self, hosts: Sequence[Host], order: Sequence[Host]) -> None:
        if not hosts or self._asked_to_stop:
            return
        trouble = answers(hosts, 3.0)
        for host in hosts:
            if host.name not in trouble:
                self._start(host, order)

    def _start(self, host: Host, order: Sequence[Host]) -> None:
        leader = order[0]
        port = _FIRST_PORT + zlib.crc32(f"{self.wanted.run} {self.attempt}".encode()) % _PORTS
        start = replace(
            self.wanted.start,
            loaded=self.wanted.start.loaded.on_nodes(self.wanted.fewest, len(order)),
            node_rank=order.index(host),
            leader=f"{leader.name}:{port}",
            fresh=self.wanted.start.fresh and self.attempt == 1,
        )
        self.agents[host.name] = Remote(
            host,
            [self.wanted.python, "-m", "dure", "agent", STANDARD_INPUT],
            start.to_line(),
            self._key,
            prefix=f"[{host.name}] ",
            out=print if host is leader else None,
        )

    def _order(self, leader: Host) -> list[Host]:
        """All hosts, the leader first: the place in this list is the node's number."""
        at = self.wanted.hosts.index(leader)
        return [*self.wanted.hosts[at:], *self.wanted.hosts[:at]]

    def _next_leader(self, lost: Host | None) -> Host:
        """The next host that answers; the lost leader only if there is no other."""
        order = self._order(lost or self.wanted.hosts[0])
        candidates = order[1:] + order[:1] if lost else order
        deadline = time.monotonic() + 600.0
        while time.monotonic() < deadline:
            self._stop.check()
            trouble = answers(candidates, _ANSWER_SECONDS)
            there = [host for host in candidates if host.name not in trouble]
            if len(there) >= self.wanted.fewest:
                return there[0]
            say(f"waits for {', '.join(trouble)}: {next(iter(trouble.values()))}")
            time.sleep(_COME_BACK_SECONDS)
        raise Resumable(
            f"fewer than {self.wanted.fewest} of the hosts answer since 10 minutes. Resumable: the same command with "
            f"--run-dir {self.wanted.run} goes on"
        )

    def _ask_to_stop(self, signal_name: str) -> None:
        self._asked_to_stop = True
        say(f"{signal_name}: the run stops after this step and saves; once more stops at once")
        for agent in self.agents.values():
            agent.tell(STOP)

    def _end_all(self) -> None:
        """Leave no agent behind, as far as hosts can be reached."""
        for agent in self.agents.values():
            if agent.exit_code() is None:
                agent.tell(KILL)
                agent.let_go()
        deadline = time.monotonic() + 5.0
        for agent in self.agents.values():
            if agent.wait(deadline) is None:
                agent.kill()
                agent.wait(time.monotonic() + 1.0)
        self.agents.clear()


class _Ended(DureError):
    """An agent's failure, which has been printed already."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
