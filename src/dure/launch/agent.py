"""torch's elastic agent over our ranks: it assigns ranks and their environment, we watch the processes.

`SimpleElasticAgent` is torch's state machine (rendezvous, rank assignment, exit barrier) with the processes
left to a subclass. torch's own subclass, `LocalElasticAgent`, is not used: its poll of ended ranks joins
without a deadline, waits 30 s for ranks that cannot take SIGTERM, and never notices a rank that left with
`os._exit(0)`; its semaphores outlive a killed launcher.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events.api import Event, EventSource

from dure.base.errors import RankFailed, Resumable
from dure.base.run_folder import RunFolder
from dure.base.say import say
from dure.launch.agent_link import AgentLink, Rendezvous
from dure.launch.exit_watch import LeaveWatch
from dure.launch.failure import Fault, rank_failed, settled_cause, tail
from dure.launch.hang import HangWatch
from dure.launch.nodes.messages import Again, End, Team
from dure.launch.rank import RankStart, Returned
from dure.launch.ranks import Ranks
from dure.launch.stop import StopSignals, in_words

_LOOK_SECONDS = 0.03
_TICK_SECONDS = 0.1
_FILE_SECONDS = 1.0
_SHORT_SECONDS = 2.0
"""A wait that needs no explanation."""
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_EXIT_SECONDS = 10.0
_BIRTH_SECONDS = 300.0
_NO_LIMIT = 1 << 30


@dataclass(frozen=True)
class Plan:
    """What the agent is to do with its ranks."""

    folder: RunFolder
    start: Callable[[int, dict[str, str], bool], RankStart]
    """How a rank begins, from its number, its environment, and whether it takes a dead one's place."""
    returns: bool
    """Whether ranks send home a value; otherwise exit code 0 is success."""
    reports: bool
    """Whether ranks say why they fail; a program of its own does not."""
    grace_seconds: float
    """How long ranks that are told to end may take before they are killed."""
    on_tick: Callable[[], None] | None
    max_restarts: int
    """How often the team is born again without getting any further."""
    stops_at_a_step: bool
    """Whether ranks can be asked to stop and save; otherwise the signal that asks for it is passed on to them."""
    stop_seconds: float
    """How long ranks that have been asked to stop may take."""


class TeamAgent(SimpleElasticAgent):
    """The elastic agent of one node."""

    def __init__(
        self,
        agent_link: AgentLink,
        plan: Plan,
        ranks: Ranks,
        stop: StopSignals,
        watch: HangWatch | None,
    ) -> None:
        self._rendezvous_handler = Rendezvous(agent_link, plan.folder.path.name)
        spec = WorkerSpec(
            role="default",
            local_world_size=ranks.count,
            rdzv_handler=self._rendezvous_handler,
            entrypoint="dure",
            # Torch counts all restarts of a run; `RestartPolicy` counts those without progress, and decides.
            max_restarts=_NO_LIMIT,
            monitor_interval=_LOOK_SECONDS,
        )
        super().__init__(spec, exit_barrier_timeout=10)
        self._plan = plan
        self._ranks = ranks
        self._stop = stop
        self._watch = watch
        self._leave_watch = None if plan.returns else LeaveWatch(ranks, plan.folder)
        self._ticked_at = 0.0
        self._looked_for_file_at = 0.0
        self._leaving: dict[int, float] = {}
        self._agent_link = agent_link
        self._answered = False
        """Whether the ranks' end has been told: what is left is to hear what comes of it."""

    @property
    def _team(self) -> Team:
        assert self._rendezvous_handler.team is not None  # ranks start after the rendezvous
        return self._rendezvous_handler.team

    def _assign_worker_ranks(
        self, store: object, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        # Torch's own asks the other agents through the store, and waits for those that have gone meanwhile.
        team = self._team
        return [
            Worker(
                local_rank=local_rank,
                global_rank=team.first_rank + local_rank,
                role_rank=team.first_rank + local_rank,
                world_size=team.ranks,
                role_world_size=team.ranks,
            )
            for local_rank in range(team.local_ranks)
        ]

    def _exit_barrier(self) -> None:
        """All agents have been heard of before this one was told that the run is over."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        restarts = self._team.restarts
        self._ranks.renumber(self._team.first_rank, self._team.local_ranks)
        starts = []
        for worker in worker_group.workers:
            env = _rank_environment(worker_group, worker)
            env["TORCHELASTIC_RESTART_COUNT"] = str(restarts)
            env["TORCHELASTIC_MAX_RESTARTS"] = str(self._plan.max_restarts)
            starts.append(self._plan.start(worker.global_rank, env, self._team.number > 1 or restarts > 0))
        self._ranks.start(starts, _BIRTH_SECONDS, self._look_around)
        return {rank - self._team.first_rank: pid for rank, pid in self._ranks.pids.items()}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Clear the way for a new team, at once: what is left of the old one can only wait for its dead."""
        if stuck := self._ranks.end(0.0):
            raise RankFailed(
                f"rank(s) {stuck} cannot be ended, not even by SIGKILL: the kernel waits for a disk or a driver, "
                "so no new team can start here",
                rank=stuck[0],
                host=socket.gethostname(),
            )
        self._ranks.forget()
        self._leaving.clear()
        self._answered = False
        if self._watch is not None:
            self._watch.start_anew()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 0) -> None:
        """End the ranks: by the signal that asked for it, where there is one. A further signal ends the grace."""
        grace, asked = self._plan.grace_seconds, self._stop.received
        tell_at = time.monotonic() + (0.0 if asked is not None else _SHORT_SECONDS)
        told = False

        def hurry() -> bool:
            nonlocal told
            if not told and time.monotonic() >= tell_at and grace > _SHORT_SECONDS:
                told = True
                left = ", ".join(map(str, self._ranks.alive()))
                why = "" if asked is None else f"{in_words(asked)}: "
                again = "" if asked is None else "; once more ends them at once"
                say(f"{why}waits up to {grace:.0f} s for rank(s) {left} to end{again}")
            return self._stop.again() if asked is not None else self._stop.received is not None

        self._ranks.end(grace, asked if asked in _PASSED_ON else death_sig, hurry)
        if self._ranks.killed and grace > 0:
            say(f"rank(s) {', '.join(map(str, self._ranks.killed))} did not end, and were killed")

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._look_around()
        self._ranks.poll()
        if not self._answered:
            try:
                self._answered = self._look_at_ranks()
            except RankFailed as failed:
                self._answered = True
                self._agent_link.failed(failed, self._watch.furthest_step() if self._watch is not None else 0)
        match self._agent_link.look(self._step()):
            case Again():
                return RunResult(state=WorkerState.FAILED)
            case End() as end:
                if (error := end.error()) is not None:
                    raise error
                return RunResult(state=WorkerState.SUCCEEDED, return_values=self._values())
        return RunResult(state=WorkerState.HEALTHY)

    def _look_at_ranks(self) -> bool:
        """Whether all ranks have ended well, and the oversight has been told; raises RankFailed with a cause."""
        ranks = self._ranks
        returns = self._plan.returns
        faults = [
            fault for rank in ranks.numbers if (fault := ranks.fault(rank, returns=returns)) is not None
        ]
        if faults:
            self._judge(faults)
            return False
        if len(ranks.ended) == ranks.count:
            self._agent_link.done(list(self._values().values()))
            return True
        if ranks.lost:
            raise RankFailed(f"all ranks are lost: {ranks.lost}", rank=-1, host=socket.gethostname())
        self._hurry_leavers()
        if self._leave_watch is not None:
            self._leave_watch.look()
        if self._watch is not None:
            self._watch.look()
        return False

    def _step(self) -> int:
        return self._watch.seen_step if self._watch is not None else 0

    def _look_around(self) -> None:
        self._stop.check()
        now = time.monotonic()
        if self._plan.stops_at_a_step:
            self._look_for_stop(now)
        if self._plan.on_tick is not None and now - self._ticked_at >= _TICK_SECONDS:
            self._ticked_at = now
            self._plan.on_tick()

    def _look_for_stop(self, now: float) -> None:
        """Raise Resumable when ranks that were asked to stop, here or elsewhere, have not by their deadline."""
        if now - self._looked_for_file_at >= _FILE_SECONDS:
            self._looked_for_file_at = now
            if self._plan.folder.asked_to_stop():
                self._stop.asked_elsewhere()
        asked_at = self._stop.asked_at
        if asked_at is None or now - asked_at < self._plan.stop_seconds:
            return
        who = f" {self._watch.verdict()}" if self._watch is not None and self._ranks.pids else ""
        raise Resumable(
            f"the run was asked to stop, and has not saved within {self._plan.stop_seconds:.0f} s "
            f"(team.stop_seconds): all ranks are ended.{who} Resumable: the same command with --run-dir goes on from "
            "its newest checkpoint"
        )

    def _judge(self, faults: list[Fault]) -> None:
        """Raise the cause, unless a better one may come: the rank that failed first may still unwind."""
        cause = settled_cause(faults, self._ranks.count - len(faults))
        if cause is None:
            return
        log = self._plan.folder.log(cause.rank)
        returned = isinstance(self._ranks.reports.get(cause.rank), Returned)
        raise rank_failed(cause, log, returned=returned, silent=self._plan.reports)

    def _hurry_leavers(self) -> None:
        """Raise for a rank that has returned but does not end: a thread, a child or an exit hook holds it."""
        now = time.monotonic()
        for rank in self._ranks.alive():
            if rank in self._ranks.reports:
                since = self._leaving.setdefault(rank, now)
                if now - since > _EXIT_SECONDS:
                    host, log = socket.gethostname(), self._plan.folder.log(rank)
                    raise RankFailed(
                        f"rank {rank} on {host} returned, but its process did not end within "
                        f"{_EXIT_SECONDS:.0f} s: does it wait for a child process or an exit hook? "
                        f"Its output: {log}",
                        rank=rank,
                        host=host,
                        details=tail(log),
                    )

    def _values(self) -> dict[int, Any]:
        values: dict[int, Any] = {}
        for rank in self._ranks.numbers:
            report = self._ranks.reports.get(rank)
            values[rank] = pickle.loads(report.value) if isinstance(report, Returned) else None
        return values

    def _construct_event(
        self,
        state: str,
        source: EventSource,
        worker: Worker | None = None,
        raw_error: str | None = None,
        duration_ms: float | None = None,
        exit_code: int | None = None,
        worker_pid: int | None = None,
    ) -> Event:
        # torch's own asks the name server for this host's full name, for each event that nobody records.
        return Event(f"torchelastic.worker.status.{state}", source=source)


def _rank_environment(group: WorkerGroup, worker: Worker) -> dict[str, str]:
    """Return what torchrun adds to the environment of a rank (a test compares it with torchrun's)."""
    spec = group.spec
    return {
        "LOCAL_RANK": str(worker.local_rank),
        "RANK": str(worker.global_rank),
        "GROUP_RANK": str(group.group_rank),
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_NAME": spec.role,
        "LOCAL_WORLD_SIZE": str(len(group.workers)),  # a team may be smaller than the first
        "WORLD_SIZE": str(worker.world_size),
        "GROUP_WORLD_SIZE": str(group.group_world_size),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "MASTER_ADDR": str(group.master_addr),
        "MASTER_PORT": str(group.master_port),
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
