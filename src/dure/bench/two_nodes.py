"""The documents' two nodes, 10.0.1.10 and 10.0.1.11, on one machine.

A node is a network, a mount and a host-name namespace: its own interfaces, its own /dev/shm, its own name.
The namespaces have no name in the file system. They live as long as a process is in them, and the process
that keeps a node ends when its standard input does: however this process ends, kill -9 too, the kernel
takes the nodes away with everything in them.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from dure.errors import DureError, RankFailed, UsageError
from dure.launch.failure import rank_failed, settled_cause
from dure.launch.rank import Call, RankStart, Returned
from dure.launch.ranks import Ranks
from dure.launch.stop import StopSignals
from dure.launch.team import TORCH, forget_last_run
from dure.run_folder import RunFolder

ADDRESSES = ("10.0.1.10", "10.0.1.11")
HOSTS = ("node0", "node1")
LINK = "eth0"

_COMMANDS = ("ip", "tc", "unshare", "nsenter")
_PORT = 29500
_SETUP_SECONDS = 30.0
_BIRTH_SECONDS = 120.0
_LOOK_SECONDS = 0.03
_GRACE_SECONDS = 1.0
_QUEUE = "latency 50ms"
_BURST_SECONDS = 1e-3
_LEAST_BURST = 128 * 1024

# A file that is mounted over another stays there when its own name is gone, so /dev/shm is left empty.
_MAKE_NODE = """
mount -t tmpfs -o mode=1777 shm /dev/shm
hostname "$1"
ip link set lo up
printf '127.0.0.1 localhost\\n10.0.1.10 node0\\n10.0.1.11 node1\\n' >/dev/shm/hosts
mount --bind /dev/shm/hosts /etc/hosts
rm /dev/shm/hosts
echo up
exec cat
"""
_TRY = (
    "ip link add eth0 type veth peer name eth1 && "
    "tc qdisc add dev eth0 root tbf rate 1gbit burst 128kb latency 50ms"
)


def why_not_here() -> str | None:
    """Why two nodes cannot be made on this machine, or None."""
    if os.geteuid() != 0:
        return "two nodes on one machine take root"
    missing = [name for name in _COMMANDS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: iproute2, util-linux)"
    try:
        _run(["unshare", "--mount", "--uts", "--net", "sh", "-c", _TRY])
    except DureError as error:
        return f"the kernel refuses: {error}"
    return None


def bits_per_second(rate: str) -> float:
    """Read a rate as `tc` writes it: 10gbit, 2.5gbit, 100mbit."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmg])bit", rate)
    if match is None or float(match[1]) == 0:
        raise UsageError(f"a rate of {rate!r} cannot be; write it as tc does, such as 10gbit or 100mbit")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


@dataclass(frozen=True)
class _Node:
    """One node, and the process that keeps it."""

    number: int
    keeper: subprocess.Popen[bytes]

    def enter(self, *namespaces: str) -> list[str]:
        """The command that becomes, inside this node, the command that follows it."""
        return ["nsenter", "--target", str(self.keeper.pid), *(f"--{name}" for name in namespaces), "--"]


class TwoNodes:
    """Within `with`, two nodes that are joined by one link of `rate` each way (None: as fast as it goes)."""

    def __init__(self, rate: str | None = None) -> None:
        self.rate = rate
        self._burst = (
            0 if rate is None else max(_LEAST_BURST, int(bits_per_second(rate) / 8 * _BURST_SECONDS))
        )
        self._nodes: list[_Node] = []
        self._runs = 0

    def __enter__(self) -> TwoNodes:
        reason = why_not_here()
        if reason is not None:
            raise UsageError(f"cannot make two nodes here: {reason}")
        try:
            for number in range(len(HOSTS)):
                self._nodes.append(_Node(number, _start_keeper(number)))
            for node in self._nodes:
                _wait_until_up(node)
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
        return [*self._nodes[node].enter("mount", "uts", "net"), *arguments]

    def byte_counters(self) -> tuple[int, int]:
        """Bytes that the link has carried so far, from node 0 to node 1 and from node 1 to node 0."""
        first, second = (sent_bytes(node.keeper.pid) for node in self._nodes)
        return first, second

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
        `preload` and the module of `entry` are imported once a node, before its ranks are forked.

        Raises RankFailed with the first cause, or naming who has not returned by the deadline; no rank is
        left then. Call it from the main thread.
        """
        if ranks_per_node < 1:
            raise UsageError(f"{ranks_per_node} ranks a node cannot be started; use 1 or more")
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
        """Lay the link, born inside the nodes: not even its name is ever seen outside."""
        first, second = (str(node.keeper.pid) for node in self._nodes)
        _run(
            ["ip", "link", "add", LINK, "netns", first, "type", "veth", "peer", "name", LINK, "netns", second]
        )
        for node in self._nodes:
            within = node.enter("net")
            _run([*within, "ip", "address", "add", f"{ADDRESSES[node.number]}/24", "dev", LINK])
            _run([*within, "ip", "link", "set", LINK, "up"])
            if self.rate is not None:
                # What a link of this rate carries in a millisecond may go at once: enough for the kernel's
                # timers to keep the rate, and too little to let a bucket of gradients slip through.
                shape = f"tbf rate {self.rate} burst {self._burst} {_QUEUE}"
                _run([*within, "tc", "qdisc", "add", "dev", LINK, "root", *shape.split()])

    def _rank_environment(self, rank: int, node: int, ranks_per_node: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks_per_node * len(self._nodes)),
            "LOCAL_RANK": str(rank - node * ranks_per_node),
            "LOCAL_WORLD_SIZE": str(ranks_per_node),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(len(self._nodes)),
            "MASTER_ADDR": ADDRESSES[0],
            # Ranks that were killed may leave connections behind; the next run meets elsewhere.
            "MASTER_PORT": str(_PORT + self._runs),
            "GLOO_SOCKET_IFNAME": LINK,
        }

    def _end(self) -> None:
        for node in self._nodes:
            with contextlib.suppress(OSError):
                node.keeper.stdin.close()  # type: ignore[union-attr]
        for node in self._nodes:
            try:
                node.keeper.wait(_SETUP_SECONDS)
            except subprocess.TimeoutExpired:
                node.keeper.kill()
                node.keeper.wait(_SETUP_SECONDS)
            for stream in (node.keeper.stdout, node.keeper.stderr):
                stream.close()  # type: ignore[union-attr]
        self._nodes.clear()


def sent_bytes(process: int | str = "self") -> int:
    """Bytes that the node of a process has put on its link."""
    with open(f"/proc/{process}/net/dev") as lines:
        for line in lines:
            name, _, counters = line.partition(":")
            if name.strip() == LINK:
                return int(counters.split()[8])
    raise DureError(f"process {process} has no interface {LINK}; is it on one of the two nodes?")


def _start_keeper(number: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["unshare", "--mount", "--uts", "--net", "sh", "-ec", _MAKE_NODE, "sh", HOSTS[number]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C in the terminal is for us; a node ends when we say so
    )


def _wait_until_up(node: _Node) -> None:
    assert node.keeper.stdout is not None
    assert node.keeper.stderr is not None
    ready, _, _ = select.select([node.keeper.stdout], [], [], _SETUP_SECONDS)
    if not ready:
        raise DureError(f"{HOSTS[node.number]} was not up within {_SETUP_SECONDS:.0f} s")
    if os.read(node.keeper.stdout.fileno(), 16) != b"up\n":
        words = node.keeper.stderr.read().decode(errors="replace").strip()
        raise DureError(f"{HOSTS[node.number]} cannot be set up: {words}")


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
        faults = [
            fault
            for rank, (_, team) in place.items()
            if (fault := team.fault(rank, returns=True)) is not None
        ]
        cause = settled_cause(faults, len(place) - len(faults))
        if cause is not None:
            node, team = place[cause.rank]
            returned = isinstance(team.reports.get(cause.rank), Returned)
            raise rank_failed(cause, folder.log(cause.rank), returned=returned, host=HOSTS[node])
        running = [rank for rank, (_, team) in place.items() if rank not in team.ended]
        if not running:
            return [_value(team, rank) for rank, (_, team) in place.items()]
        for node, team in enumerate(teams):
            if team.lost:
                raise RankFailed(
                    f"all ranks of {HOSTS[node]} are lost: {team.lost}", rank=-1, host=HOSTS[node]
                )
        if time.monotonic() > deadline:
            raise RankFailed(
                f"rank(s) {', '.join(map(str, running))} did not end within {deadline_seconds:.0f} s; "
                f"their output: {folder.log(running[0]).parent}",
                rank=running[0],
                host=HOSTS[place[running[0]][0]],
            )
        time.sleep(_LOOK_SECONDS)


def _value(team: Ranks, rank: int) -> object:
    report = team.reports[rank]
    assert isinstance(report, Returned)  # a rank that ended otherwise is a fault
    value: object = pickle.loads(report.value)
    return value


def _own_environment() -> dict[str, str]:
    """This process's environment, without what another launcher says about ranks of its own."""
    foreign = ("DURE_RUN", "ROLE_", "SLURM_", "TORCHELASTIC_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return kept | {"OMP_NUM_THREADS": "1"}


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SETUP_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise DureError(f"{' '.join(command)} took more than {_SETUP_SECONDS:.0f} s") from None
    if done.returncode:
        raise DureError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
