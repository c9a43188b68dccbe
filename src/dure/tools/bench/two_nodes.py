"""Nodes of this machine, 10.0.1.10, 10.0.1.11 and so on: two of them as in the documents, or more.

A node is a network, a mount and a host-name namespace: its own interfaces, its own /dev/shm, its own name.
The namespaces have no name in the file system. They live as long as a process is in them, and the process
that keeps a node ends when its standard input does: however this process ends, kill -9 too, the kernel
takes the nodes away with everything in them.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from dure.base.errors import Failure, RankFailed, UsageError
from dure.base.run_folder import RunFolder
from dure.launch.failure import settled_cause
from dure.launch.preload import TORCH
from dure.launch.rank import Call, RankStart, Returned
from dure.launch.ranks import Ranks
from dure.launch.stop import StopSignals
from dure.launch.team import forget_last_run
from dure.tools.lab.machine import run, why_not_here
from dure.tools.lab.network import (
    LINK,
    LOGIN,
    LOGIN_ADDRESS,
    bits_per_second,
    bring_up,
    host_names,
    lay_cables,
    node_address,
    node_name,
    sent_bytes,
    shaping,
)
from dure.tools.lab.place import Order, Place, StartingPlace, make_place

HOSTS = tuple(node_name(number) for number in range(2))
ADDRESSES = tuple(node_address(number) for number in range(2))
MOST_NODES = 64

_PORT = 29500
_BIRTH_SECONDS = 120.0
_LOOK_SECONDS = 0.03
_GRACE_SECONDS = 1.0


class SeveralNodes:
    """Within `with`, so many nodes: two by one link, more by a switch; links of `rate` each way (None: unshaped)."""

    def __init__(self, nodes: int, rate: str | None = None) -> None:
        if rate is not None:
            bits_per_second(rate)
        if not 2 <= nodes <= MOST_NODES:
            raise UsageError(f"{nodes} nodes cannot be made here; use 2 to {MOST_NODES}")
        self.rate = rate
        self._addresses = {node_name(number): node_address(number) for number in range(nodes)}
        self._starting: list[StartingPlace] = []
        self._nodes: list[Place] = []
        self._runs = 0

    def __enter__(self) -> Self:
        reason = why_not_here()
        if reason is not None:
            raise UsageError(f"cannot make nodes here: {reason}")
        try:
            names = host_names(self._addresses)
            # Without a PID namespace: the launcher that is not on the node sees its ranks there.
            places = [*self._addresses, *([LOGIN] if len(self._addresses) > 2 else [])]
            self._starting += [make_place(Order(host, names, processes=False)) for host in places]
            made = [node.wait() for node in self._starting]
            self._nodes += made[: len(self._addresses)]
            if len(self._addresses) > 2:
                lay_cables(made[-1], self._nodes, {LOGIN: LOGIN_ADDRESS} | self._addresses, self.rate)
            else:
                self._join()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def command(self, node: int, arguments: Sequence[str]) -> list[str]:
        """The command line that runs `arguments` on a node (from `/`: a node has its own mounts)."""
        return [*self._nodes[node].within("mount", "uts", "net"), *arguments]

    def byte_counters(self) -> tuple[int, ...]:
        """Bytes that each node has sent so far."""
        return tuple(sent_bytes(node.pid) for node in self._nodes)

    def run_ranks(
        self,
        entry: str,
        args: tuple[object, ...],
        *,
        ranks_per_node: int = 4,
        folder: RunFolder,
        deadline_seconds: float = 600.0,
        preload: Sequence[str] = TORCH,
    ) -> list[object]:
        """Call `entry` (`package.module:function`) with `args` on every rank; return their values in rank order.

        Ranks find torchrun's environment variables, one thread, and their output in `folder.log(rank)`.
        `preload` and the module of `entry` are imported once per node, before its ranks are forked.

        Raises RankFailed with the first cause, or naming who has not returned by the deadline; no rank is
        left then. Call it from the main thread.
        """
        if ranks_per_node < 1:
            raise UsageError(f"{ranks_per_node} ranks per node cannot be started; use 1 or more")
        folder = RunFolder(folder.path.absolute())  # ranks start in `/`
        folder.create()
        forget_last_run(folder, ranks_per_node * len(self._nodes))
        self._runs += 1
        base = _own_environment()
        search_path = tuple(os.path.abspath(folder_name) for folder_name in sys.path)
        call = Call(entry, pickle.dumps(args), 1, folder, search_path)
        teams: list[Ranks] = []
        with StopSignals() as stop:
            try:
                for node in range(len(self._nodes)):
                    numbers = range(node * ranks_per_node, (node + 1) * ranks_per_node)
                    teams.append(
                        Ranks(
                            [folder.log(rank) for rank in numbers],
                            preload=(*preload, entry.partition(":")[0]),
                            env=base,
                            search_path=search_path,
                            tee=False,
                            first=numbers.start,
                            within=self.command(node, []),
                        )
                    )
                for node, team in enumerate(teams):
                    starts = [
                        RankStart(
                            rank,
                            base | self._rank_environment(rank, node, ranks_per_node),
                            str(folder.path),
                            folder.log(rank),
                            call,
                        )
                        for rank in team.numbers
                    ]
                    team.start(starts, _BIRTH_SECONDS, stop.check)
                return _wait_for(teams, folder, stop, deadline_seconds)
            finally:
                for team in teams:
                    team.end(_GRACE_SECONDS)
                for team in teams:
                    team.close()

    def _join(self) -> None:
        """Make the link, inside the nodes: not even its name is ever seen outside."""
        first, second = (str(node.pid) for node in self._nodes)
        run(
            ["ip", "link", "add", LINK, "netns", first, "type", "veth", "peer", "name", LINK, "netns", second]
        )
        for node, address in zip(self._nodes, self._addresses.values(), strict=True):
            bring_up(node, address)
            if self.rate is not None:
                run([*node.within("net"), *shaping(LINK, self.rate)])

    def _rank_environment(self, rank: int, node: int, ranks_per_node: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks_per_node * len(self._nodes)),
            "LOCAL_RANK": str(rank - node * ranks_per_node),
            "LOCAL_WORLD_SIZE": str(ranks_per_node),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(len(self._nodes)),
            "MASTER_ADDR": node_address(0),
            # Ranks that were killed may leave connections behind; the next run uses another port.
            "MASTER_PORT": str(_PORT + self._runs),
            "GLOO_SOCKET_IFNAME": LINK,
        }

    def _end(self) -> None:
        for node in self._starting:
            node.let_go()
        self._starting.clear()
        self._nodes.clear()


class TwoNodes(SeveralNodes):
    """The documents' two."""

    def __init__(self, rate: str | None = None) -> None:
        super().__init__(2, rate)


def _wait_for(
    teams: Sequence[Ranks], folder: RunFolder, stop: StopSignals, deadline_seconds: float
) -> list[object]:
    """What all ranks returned; the first failure of any of them is raised."""
    deadline = time.monotonic() + deadline_seconds
    place = {rank: (node, team) for node, team in enumerate(teams) for rank in team.numbers}
    while True:
        stop.check()
        for team in teams:
            team.poll()
        failures = [
            failure
            for rank, (node, team) in place.items()
            if (failure := team.failure(rank, folder.log(rank), returns=True, host=node_name(node)))
            is not None
        ]
        if (cause := settled_cause(failures, len(place) - len(failures))) is not None:
            raise RankFailed(cause)
        running = [rank for rank, (_, team) in place.items() if rank not in team.ended]
        if not running:
            return [_value(team, rank) for rank, (_, team) in place.items()]
        for node, team in enumerate(teams):
            if team.lost:
                raise RankFailed(
                    Failure(f"all ranks of {node_name(node)} are lost: {team.lost}", host=node_name(node))
                )
        if time.monotonic() > deadline:
            message = (
                f"rank(s) {', '.join(map(str, running))} did not end within {deadline_seconds:.0f} s; "
                f"their output: {folder.log(running[0]).parent}"
            )
            raise RankFailed(Failure(message, rank=running[0], host=node_name(place[running[0]][0])))
        time.sleep(_LOOK_SECONDS)


def _value(team: Ranks, rank: int) -> object:
    report = team.reports[rank]
    assert isinstance(report, Returned)  # a rank that ended otherwise has failed
    value: object = pickle.loads(report.value)
    return value


def _own_environment() -> dict[str, str]:
    """This process's environment, without what another launcher says about ranks of its own."""
    foreign = ("DURE_RUN", "ROLE_", "SLURM_", "TORCHELASTIC_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return kept | {"OMP_NUM_THREADS": "1"}
