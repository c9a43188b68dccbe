"""A run on machines that an engine has: an agent on each, all taken down together, all started again when they must."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dure.base.errors import DureError, Resumable, UsageError
from dure.base.run_folder import RunFolder
from dure.base.say import say
from dure.base.team_key import TeamKey
from dure.engine.attached import KILL, NODE_LOST, STOP
from dure.engine.interface import LOST, Machines, RunningAgent
from dure.launch.lease import LeaseOver
from dure.launch.stop import StopSignals

if TYPE_CHECKING:
    from dure.engine.node_start import NodeStart

_LOOK_SECONDS = 0.1
_ANSWER_SECONDS = 8.0
_LAST_WORDS_SECONDS = 20.0
"""How long agents may take to notice that their leader is gone, and to end."""
_COME_BACK_SECONDS = 5.0
"""Between two looks whether a lost node is back."""
_LONG_SECONDS = 60.0
"""A run that lasted so long made progress: it may be started again as often as at first."""
_FIRST_PORT, _PORTS = 20000, 10000
_CUT_OFF = (LOST, LeaseOver.exit_code)
"""How an agent ends whose node was lost, or that had lost us: neither is the run's failure."""


@dataclass(frozen=True)
class Wanted:
    """What is to run."""

    fewest: int
    start: NodeStart
    """What every node is handed, but for its number and its leader."""
    run: str
    max_restarts: int
    lost_seconds: float
    """An agent that has not heard of us for so long has ended by itself."""

    @classmethod
    def of(cls, start: NodeStart) -> Wanted:
        """What a start asks for; its run's folder is known."""
        job = start.loaded.job
        return cls(
            fewest=job.cluster.min_nodes or job.cluster.nodes,
            start=replace(start, attached=True),
            run=str(start.run_dir),
            max_restarts=job.team.max_restarts,
            lost_seconds=job.cluster.lost_seconds,
        )


@dataclass
class Supervisor:
    """Starts agents and watches them. `out` takes what the leader prints on standard output."""

    machines: Machines
    wanted: Wanted
    out: Callable[[str], None] = print
    agents: dict[str, RunningAgent] = field(default_factory=dict)
    attempt: int = 0
    _key: TeamKey = field(default_factory=TeamKey.random)
    """Another in each attempt: who is left of an earlier one does not come into it."""
    _stop: StopSignals = field(init=False)
    _asked_to_stop: bool = False

    def run(self) -> None:
        """Until the run is done. Raises what the command ends with otherwise."""
        self._stop = StopSignals(self._ask_to_stop)
        with contextlib.ExitStack() as held:
            held.callback(self.machines.close)
            if threading.current_thread() is threading.main_thread():  # no other can have handlers
                held.enter_context(self._stop)
            held.callback(self._end_all)
            self._run_until_done()

    def _run_until_done(self) -> None:
        tries = 0
        leader = self.machines.names[0]
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
            say(f"{why}; starts again with {leader} as the leader")

    def _run_once(self, leader: str) -> tuple[str, bool]:
        """("", …) when the run is done; else why it is to be started again, and whether the leader was lost."""
        order = self._order(leader)
        trouble = self.machines.trouble(order, _ANSWER_SECONDS)
        here = [name for name in order if name not in trouble]
        for name, why in trouble.items():
            say(f"{name} cannot be reached: {why}")
        if len(here) < self.wanted.fewest and self.attempt == 0:
            raise UsageError(
                f"{', '.join(trouble)} cannot be reached, and at least {self.wanted.fewest} of the "
                f"nodes must be; {self.machines.way_out(next(iter(trouble)))}"
            )
        if len(here) < self.wanted.fewest or leader not in here:
            return f"{', '.join(trouble)} cannot be reached", leader not in here
        self.attempt += 1
        self._key = TeamKey.random()
        for name in here:
            self._start(name, order)
        retry_at = time.monotonic() + _COME_BACK_SECONDS
        given_up: set[str] = set()
        while True:
            self._stop.check()
            time.sleep(_LOOK_SECONDS)
            # By a file in the run's folder: the agents see it by themselves, and take it away when they have saved.
            self._asked_to_stop |= RunFolder(Path(self.wanted.run)).asked_to_stop()
            code = self.agents[leader].exit_code()
            if code is not None:
                return self._after_leader(leader, code)
            for name in order:
                agent = self.agents.get(name)
                if agent is not None and name != leader and agent.exit_code() is not None:
                    self._forget(name, agent, order, given_up)
            if time.monotonic() > retry_at:
                self._bring_back([name for name in order if name not in {*self.agents, *given_up}], order)
                retry_at = time.monotonic() + _COME_BACK_SECONDS

    def _after_leader(self, leader: str, code: int) -> tuple[str, bool]:
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
            if code == LOST:
                # It may live, only cut off, and train on alone: until it notices that it has no supervisor.
                self._wait(self.wanted.lost_seconds)
            return f"the leader, {leader}, is lost", True
        if code == Resumable.exit_code:
            lost = [name for name, ended in codes.items() if ended not in (0, Resumable.exit_code)]
            return f"{', '.join(lost) or 'a node'} is lost", False
        raise _Ended(f"the run ended on {leader} with exit code {code}; see above for the cause", code)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._stop.check()
            time.sleep(_LOOK_SECONDS)

    def _forget(self, name: str, agent: RunningAgent, order: Sequence[str], given_up: set[str]) -> None:
        code = agent.wait(time.monotonic() + 1.0)
        del self.agents[name]
        if code not in (0, Resumable.exit_code, *_CUT_OFF, None) and code is not None and 0 < code < 128:
            given_up.add(name)  # it said why, and would say it again
            say(f"the agent on {name} ended with exit code {code}, and is not started again")
        elif code != 0:
            say(f"{name} is lost; it is taken back when it answers")
            if why := agent.lost_because():
                self.agents[order[0]].tell(NODE_LOST, node=order.index(name), why=why)

    def _bring_back(self, names: Sequence[str], order: Sequence[str]) -> None:
        if not names or self._asked_to_stop:
            return
        trouble = self.machines.trouble(names, 3.0)
        for name in names:
            if name not in trouble:
                self._start(name, order)

    def _start(self, name: str, order: Sequence[str]) -> None:
        leader = order[0]
        port = _FIRST_PORT + zlib.crc32(f"{self.wanted.run} {self.attempt}".encode()) % _PORTS
        start = replace(
            self.wanted.start,
            loaded=self.wanted.start.loaded.on_nodes(self.wanted.fewest, len(order)),
            node_rank=order.index(name),
            leader=f"{self.machines.address(leader)}:{port}",
            fresh=self.wanted.start.fresh and self.attempt == 1,
        )
        self.agents[name] = self.machines.start(
            name, start, self._key, out=self.out if name == leader else None
        )

    def _order(self, leader: str) -> list[str]:
        """All nodes, the leader first: the place in this list is the node's number."""
        names = self.machines.names
        at = names.index(leader)
        return [*names[at:], *names[:at]]

    def _next_leader(self, lost: str | None) -> str:
        """The next node that answers; the lost leader only if there is no other."""
        order = self._order(lost or self.machines.names[0])
        candidates = order[1:] + order[:1] if lost else order
        deadline = time.monotonic() + 600.0
        while time.monotonic() < deadline:
            self._stop.check()
            trouble = self.machines.trouble(candidates, _ANSWER_SECONDS)
            there = [name for name in candidates if name not in trouble]
            if len(there) >= self.wanted.fewest:
                return there[0]
            say(f"waits for {', '.join(trouble)}: {next(iter(trouble.values()))}")
            self._wait(_COME_BACK_SECONDS)
        raise Resumable(
            f"fewer than {self.wanted.fewest} of the nodes answer since 10 minutes. Resumable: the same command with "
            f"--run-dir {self.wanted.run} goes on"
        )

    def _ask_to_stop(self, signal_name: str) -> None:
        self._asked_to_stop = True
        say(f"{signal_name}: the run stops after this step and saves; once more stops at once")
        for agent in self.agents.values():
            agent.tell(STOP)

    def _end_all(self) -> None:
        """Leave no agent behind, as far as nodes can be reached."""
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


def passed_on(name: str, out: Callable[[str], None] | None) -> Callable[[str, bool], None]:
    """What takes the lines of the agent of a node, and whether each came over standard output."""

    def take(line: str, is_output: bool) -> None:
        if is_output and out is not None:
            out(line)
        else:
            print(f"[{name}] {line}", file=sys.stderr, flush=True)

    return take


class _Ended(DureError):
    """An agent's failure, which has been printed already."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
