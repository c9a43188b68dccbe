"""The agent of one node: starts a team's ranks, watches them, and starts them again or ends as `AgentLink` decides.

The loop is ours, not torch's elastic agent: that one joins ended ranks without a deadline, waits 30 s for ranks that
cannot take SIGTERM, never notices a rank that left with `os._exit(0)`, and learns nothing of lost nodes. Ranks still
find torchrun's environment (`rank_environment`); of torch, only the TCP store is used (`rank_store`), in a
process of its own: this one never imports torch.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from dure.base.errors import Failure, RankFailed, Resumable
from dure.base.say import say
from dure.launch.agent_link import AgentLink
from dure.launch.exit_watch import LeaveWatch
from dure.launch.failure import settled_cause, tail
from dure.launch.hang import HangWatch
from dure.launch.nodes.messages import Again, End, Team
from dure.launch.rank import Call, Command, RankStart, Returned, Script
from dure.launch.ranks import Ranks
from dure.launch.spec import LaunchSpec
from dure.launch.stacks import ask_for_stacks
from dure.launch.stop import StopSignals, in_words

_LOOK_SECONDS = 0.03
_TICK_SECONDS = 0.1
_FILE_SECONDS = 1.0
_SHORT_SECONDS = 2.0
"""A wait that needs no explanation."""
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_EXIT_SECONDS = 30.0
_START_SECONDS = 300.0


class Agent:
    """Runs the ranks of one node until the run is over."""

    def __init__(
        self,
        spec: LaunchSpec,
        work: Call | Script | Command,
        env: Mapping[str, str],
        link: AgentLink,
        ranks: Ranks,
        stop: StopSignals,
    ) -> None:
        """`env` is what all ranks find in their environment, besides what torchrun would add."""
        self._spec = spec
        self._work = work
        self._env = env
        self._link = link
        self._ranks = ranks
        self._stop = stop
        self._returns = isinstance(work, Call)
        """Whether ranks send home a value; otherwise exit code 0 is success."""
        # A script's steps are of interest too, if it tells them: they are the progress that restarts count from.
        self._watch = (
            HangWatch(ranks, spec.folder, spec.hang_seconds, is_script=not self._returns)
            if math.isfinite(spec.hang_seconds) or spec.script is not None
            else None
        )
        self._leave_watch = None if self._returns else LeaveWatch(ranks, spec.folder)
        self._ticked_at = 0.0
        self._looked_for_file_at = 0.0
        self._leaving: dict[int, float] = {}
        script = spec.script
        self._max_restarts = spec.max_restarts if script is None else script.max_restarts
        self._is_stopping = False
        """Whether ranks end by themselves, resumable."""

    def run(self) -> list[Any]:
        """Run teams until one ends well; return its ranks' values. Raises what the run ends with; no rank runs then."""
        try:
            while True:
                self._start_ranks(*self._link.form())
                if self._monitor():
                    return self._values()
                self._clear_ranks()
        finally:
            self._end_ranks()

    def _start_ranks(self, team: Team, listener: socket.socket | None) -> None:
        self._ranks.renumber(team.first_rank, team.local_ranks)
        starts = [self._rank_start(team, local_rank) for local_rank in range(team.local_ranks)]
        # While no rank has run there is nothing to save.
        first = team.number <= 1 and team.restarts == 0
        self._ranks.start(starts, _START_SECONDS, partial(self._check, gently=not first), listener)

    def _rank_start(self, team: Team, local_rank: int) -> RankStart:
        folder, rank = self._spec.folder, team.first_rank + local_rank
        elastic_error = folder.error(rank).with_suffix(".torchelastic.json")
        env = {
            **self._env,
            **rank_environment(team, local_rank, folder.path.name, self._max_restarts),
            "TORCHELASTIC_ERROR_FILE": str(elastic_error.absolute()),
        }
        # Not resolved: a link in its place must be seen as one.
        log = folder.log(rank).absolute()
        return RankStart(rank, env, os.getcwd(), log, self._work, again=team.number > 1 or team.restarts > 0)

    def _monitor(self) -> bool:
        """Watch the ranks until the team is over: True at the run's good end, False to start another team."""
        told = (
            False  # whether the link knows how this node's ranks ended: what is left is to hear its decision
        )
        while True:
            self._ranks.wait(_LOOK_SECONDS)
            self._check()
            self._ranks.poll()
            if not told:
                told = self._tell_end()
            match self._link.decision(self._watch.seen_step if self._watch is not None else 0):
                case Again():
                    return False
                case End() as end:
                    if (error := end.error()) is not None:
                        raise error
                    return True

    def _tell_end(self) -> bool:
        """Tell the link when the ranks have ended, well or not; returns whether it was told."""
        try:
            if not self._all_ended_well():
                return False
        except RankFailed as failed:
            self._is_stopping = failed.exit_code == Resumable.exit_code
            self._link.failed(failed.failure, self._watch.furthest_step() if self._watch is not None else 0)
        else:
            self._link.done(self._values())
        return True

    def _clear_ranks(self) -> None:
        """Kill what is left of a failed team: it can only wait for its dead."""
        if stuck := self._ranks.end(0.0):
            message = (
                f"rank(s) {stuck} cannot be ended, not even by SIGKILL: the kernel waits for a disk or a driver, "
                "so no new team can start here"
            )
            raise RankFailed(Failure(message, rank=stuck[0], host=socket.gethostname()))
        self._ranks.forget()
        self._leaving.clear()
        if self._watch is not None:
            self._watch.start_anew()

    def _end_ranks(self) -> None:
        """End the ranks: by the signal that asked for it, where there is one. A further signal ends the grace."""
        grace, asked = self._spec.grace_seconds, self._stop.received
        at_once = asked is not None and not self._is_stopping
        tell_at = time.monotonic() + (0.0 if at_once else _SHORT_SECONDS)
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

        if self._spec.script is not None and self._spec.stops_at_a_step and grace > 0:
            self._end_those_that_save()
        self._ranks.end(grace, asked if asked in _PASSED_ON else signal.SIGTERM, hurry)
        if self._ranks.killed and grace > 0:
            say(f"rank(s) {', '.join(map(str, self._ranks.killed))} did not end, and were killed")

    def _end_those_that_save(self) -> None:
        """Kill those ranks of a script that do not end by themselves: they would take a signal for a request to save,
        and can only wait for the others. Ranks that have said why they end have the grace for their exit hooks."""
        deadline = time.monotonic() + (_EXIT_SECONDS if self._is_stopping else _SHORT_SECONDS)
        while silent := [rank for rank in self._ranks.alive() if rank not in self._ranks.reports]:
            if time.monotonic() > deadline or self._stop.again():
                break
            time.sleep(_LOOK_SECONDS)
            self._ranks.poll()
        for rank in silent:
            self._ranks.send(rank, signal.SIGKILL)

    def _all_ended_well(self) -> bool:
        """Whether all ranks have ended well; raises RankFailed with the cause when one has failed or hangs."""
        ranks = self._ranks
        failures = [failure for rank in ranks.numbers if (failure := self._failure(rank)) is not None]
        if len(ranks.ended) < ranks.count and ranks.store_failure is not None:
            failures.append(ranks.store_failure)
        if failures:
            # The rank that failed first may still unwind, and explain the others.
            if (cause := settled_cause(failures, ranks.count - len(failures))) is not None:
                raise RankFailed(cause)
            return False
        if len(ranks.ended) == ranks.count:
            return True
        if ranks.lost:
            raise RankFailed(Failure(f"all ranks are lost: {ranks.lost}", host=socket.gethostname()))
        self._hurry_leavers()
        if self._leave_watch is not None:
            self._leave_watch.look()
        if self._watch is not None:
            self._watch.look()
        return False

    def _check(self, *, gently: bool = True) -> None:
        """Raise what a signal, the lease or the stop deadline asks for; call `on_tick` when it is time."""
        self._stop.check(gently=gently)
        now = time.monotonic()
        if self._spec.stops_at_a_step:
            self._look_for_stop(now)
        if now - self._ticked_at >= _TICK_SECONDS:
            self._ticked_at = now
            self._spec.on_tick()

    def _look_for_stop(self, now: float) -> None:
        """Raise Resumable when ranks that were asked to stop, here or elsewhere, have not by their deadline."""
        if now - self._looked_for_file_at >= _FILE_SECONDS:
            self._looked_for_file_at = now
            if self._spec.folder.asked_to_stop():
                self._stop.asked_elsewhere()
        asked_at = self._stop.asked_at
        if asked_at is None or now - asked_at < self._spec.stop_seconds:
            return
        who = f" {self._watch.verdict().message}" if self._watch is not None and self._ranks.pids else ""
        raise Resumable(
            f"the run was asked to stop, and has not saved within {self._spec.stop_seconds:.0f} s "
            f"({self._spec.stop_setting}): all ranks are ended.{who} Resumable: the same command with --run-dir goes "
            "on from its newest checkpoint"
        )

    def _failure(self, rank: int) -> Failure | None:
        silent = not isinstance(self._work, Command)
        failure = self._ranks.failure(rank, self._spec.folder.log(rank), returns=self._returns, silent=silent)
        ended = self._ranks.ended.get(rank)
        if failure is None or silent or ended is None or ended.exit_code != Resumable.exit_code:
            return failure
        words = f"{failure.message} That is: stopped early and saved; the same command with --run-dir goes on"
        return replace(failure, message=words, exit_code=Resumable.exit_code, may_pass=False)

    def _hurry_leavers(self) -> None:
        """Raise for a rank that has returned but does not end: a thread, a child or an exit hook holds it."""
        now = time.monotonic()
        for rank in self._ranks.alive():
            if rank in self._ranks.reports:
                since = self._leaving.setdefault(rank, now)
                if now - since > _EXIT_SECONDS:
                    host, log = socket.gethostname(), self._spec.folder.log(rank)
                    message = (
                        f"rank {rank} on {host} returned, but its process did not end within "
                        f"{_EXIT_SECONDS:.0f} s: does it wait for a child process or an exit hook? Its stacks: "
                        f"{self._spec.folder.stacks(rank)}; its output: {log}"
                    )
                    stacks = ask_for_stacks(self._ranks, self._spec.folder, [rank], signal.SIGUSR2)[rank]
                    raise RankFailed(Failure(message, rank=rank, host=host, details=f"{tail(log)}\n{stacks}"))

    def _values(self) -> list[Any]:
        """The value of each rank of this node, in rank order."""
        reports = [self._ranks.reports.get(rank) for rank in self._ranks.numbers]
        return [pickle.loads(report.value) if isinstance(report, Returned) else None for report in reports]


def rank_environment(team: Team, local_rank: int, run_id: str, max_restarts: int) -> dict[str, str]:
    """Return what torchrun adds to the environment of a rank (a test compares it with torchrun's)."""
    rank, ranks = str(team.first_rank + local_rank), str(team.ranks)
    return {
        "LOCAL_RANK": str(local_rank),
        "RANK": rank,
        "GROUP_RANK": str(team.node),
        "ROLE_RANK": rank,
        "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": str(team.local_ranks),
        "WORLD_SIZE": ranks,
        "GROUP_WORLD_SIZE": str(team.nodes),
        "ROLE_WORLD_SIZE": ranks,
        "MASTER_ADDR": team.leader,
        "MASTER_PORT": str(team.store_port),
        "TORCHELASTIC_RESTART_COUNT": str(team.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store at MASTER_ADDR is the agent's: ranks only connect
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
