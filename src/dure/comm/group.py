"""The world's process group: joined with a deadline, failing in words."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from dure.base.errors import PeerLost, UsageError
from dure.comm.process_groups import keep_process_groups
from dure.comm.topology import Topology
from dure.device.accelerator import CPU, backends_for, device_for_small_things

WHAT_DEVICES = "agreeing on devices"
JOIN_SECONDS = 60.0
"""How long a rank waits for the others to come."""
_AGENTS = ("dure", "torchrun")
"""Launchers whose agent holds the ranks' store."""
_LONGEST_TEXT = 1 << 28
_teams = itertools.count(1)
"""Numbers for the teams of this process, as there is one process group at a time; all ranks count alike."""


Told = Callable[[list[str]], str]
"""Given what every rank told, in rank order, what is decided for all of them."""


def join_world(
    topology: Topology,
    deadline_seconds: float,
    own: str = "",
    decide: Told = lambda told: "",
    device_of: Callable[[str], torch.device] = lambda decided: CPU,
) -> tuple[Store | None, str]:
    """Make the default process group (or keep the one a script already made).

    Before any group is made, all ranks tell each other their `own` text, and `decide` says what follows for all; the
    group is made for the device that `device_of` finds in that. Returns the store that the ranks met in, None where
    they need none or where the script made the group; and what was decided. What `decide` raises, all ranks raise.
    """
    keep_process_groups()
    if dist.is_initialized():
        return None, decide(Group(None, topology.rank, topology.size).gather(own, WHAT_DEVICES))
    timeout = timedelta(seconds=deadline_seconds)
    if topology.size == 1:
        decided = decide([own])
        backends = backends_for(device_of(decided))
        dist.init_process_group(backends, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        return None, decided
    if _is_loopback(topology.leader_host):
        # A host name that resolves to nothing, or to another interface, must not matter on one machine.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = _store(topology)
    # Ranks leave their addresses in the store. A second team of the same ranks, under the same names, would find those
    # of the first one, where nobody listens any more, and wait.
    names = PrefixStore(f"team/{next(_teams)}", store)
    if topology.launcher in _AGENTS:
        store.set_timeout(timeout)
    else:
        _wait_for_all(topology, names)
    decided = _decided(topology, names, own, decide, timeout)
    backends = backends_for(device_of(decided))
    dist.init_process_group(
        backends, store=names, rank=topology.rank, world_size=topology.size, timeout=timeout
    )
    return names, decided


def _decided(topology: Topology, store: Store, own: str, decide: Told, timeout: timedelta) -> str:
    """Rank 0 decides; what it says goes through the store, as there is no group yet."""
    keys = [f"own/{rank}" for rank in range(topology.size)]
    try:
        store.set(keys[topology.rank], own)
        if topology.is_leader:
            store.wait(keys, timeout)
            told = [value.decode() for value in store.multi_get(keys)]
            try:
                answer = {"decided": decide(told)}
            except UsageError as error:
                answer = {"refused": str(error)}
            store.set("decided", json.dumps(answer))
        store.wait(["decided"], timeout)
        answer = json.loads(store.get("decided"))
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        missing = [str(rank) for rank, key in enumerate(keys) if not _is_there(store, key)]
        raise PeerLost(
            f"rank {topology.rank} waited {timeout.total_seconds():.0f} s in {WHAT_DEVICES} for rank(s) "
            f"{', '.join(missing) or '0'}: {_first_line(error)}"
        ) from None
    if "refused" in answer:
        raise UsageError(answer["refused"])
    return str(answer["decided"])


def _is_there(store: Store, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except (dist.DistStoreError, dist.DistNetworkError):
        return False


@functools.cache
def _store(topology: Topology) -> Store:
    """The store of these ranks, for as long as the process lives: a team that comes later uses it too."""
    deadline = timedelta(seconds=JOIN_SECONDS)
    if topology.launcher in _AGENTS:  # the agent holds the store
        store: Store = next(rendezvous("env://", timeout=deadline))[0]
        return store
    try:
        listener = _listener(topology) if topology.is_leader else None
        return TCPStore(
            topology.leader_host,
            topology.leader_port,
            topology.size,
            is_master=topology.is_leader,
            timeout=deadline,
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )
    except (dist.DistNetworkError, OSError) as error:
        raise _cannot_meet(topology, error) from None


def _listener(topology: Topology) -> socket.socket | None:
    """A port at the one address where the others look for rank 0: torch itself would listen at all of this host's.

    None where this host knows itself by another address than the others do: a name that is 127.0.1.1 here, a forwarded
    port. Then torch chooses.
    """
    family, *_, address = socket.getaddrinfo(
        topology.leader_host, topology.leader_port, type=socket.SOCK_STREAM
    )[0]
    own = str(address[0])
    if own.startswith("127.") and topology.leader_host not in (own, "localhost"):
        return None
    try:
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise


def _wait_for_all(topology: Topology, store: Store) -> None:
    """Wait for all ranks that somebody starts one by one, so that one that never comes is named.

    Rank 0 waits for each, the others for rank 0's word: together they ask as often as there are ranks, not squared.
    """
    deadline = timedelta(seconds=JOIN_SECONDS)
    try:
        store.set(f"here/{topology.rank}", "1")
        if topology.is_leader:
            for rank in range(topology.size):
                store.wait([f"here/{rank}"], deadline)
            store.set("all here", "1")
        else:
            store.wait(["all here"], deadline)
    except dist.DistNetworkError as error:
        raise _cannot_meet(topology, error) from None
    except dist.DistStoreError:
        missing = [rank for rank in range(topology.size) if not store.check([f"here/{rank}"])]
        raise PeerLost(
            f"rank {topology.rank} waited {JOIN_SECONDS:.0f} s at "
            f"{topology.leader_host}:{topology.leader_port} for rank(s) "
            f"{', '.join(map(str, missing))}; start all {topology.size} ranks with the same --world-size and --master"
        ) from None


def _cannot_meet(topology: Topology, error: Exception) -> UsageError | PeerLost:
    where = f"{topology.leader_host}:{topology.leader_port}"
    if "EADDRINUSE" in str(error) or getattr(error, "errno", None) == errno.EADDRINUSE:
        return UsageError(
            f"port {topology.leader_port} on {topology.leader_host} is in use; choose another, for all ranks"
        )
    return PeerLost(
        f"rank {topology.rank} cannot reach rank 0 at {where} within {JOIN_SECONDS:.0f} s: {_first_line(error)}"
    )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _is_loopback(host: str) -> bool:
    try:
        return socket.gethostbyname(host).startswith("127.")
    except OSError:
        return False


class Group:
    """Ranks that exchange small things. One thread uses one group."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        rank: int,
        size: int,
        waiting: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """`waiting` is entered around every wait for the others."""
        self.group = group
        self.rank = rank
        self.size = size
        self._waiting = waiting

    def sum(self, tensor: torch.Tensor, what: str) -> None:
        """Add over all ranks, in place. Exact only where ranks fill different places."""
        if self.size > 1:
            with self._waiting(), naming_the_wait(self.rank, what):
                dist.all_reduce(tensor, group=self.group)

    def extreme(self, tensor: torch.Tensor, what: str, *, largest: bool) -> None:
        """The largest (or smallest) over all ranks, in place."""
        if self.size > 1:
            with self._waiting(), naming_the_wait(self.rank, what):
                dist.all_reduce(tensor, dist.ReduceOp.MAX if largest else dist.ReduceOp.MIN, group=self.group)

    def from_leader(self, tensor: torch.Tensor, what: str) -> None:
        """Rank 0's tensor, on all ranks, in place."""
        self.from_rank(0, tensor, what)

    def from_rank(self, rank: int, tensor: torch.Tensor, what: str) -> None:
        """One rank's tensor, on all ranks, in place."""
        if self.size > 1:
            with self._waiting(), naming_the_wait(self.rank, what):
                dist.broadcast(tensor, group=self.group, group_src=rank)

    def gather(self, value: str, what: str) -> list[str]:
        """Everyone's text, in rank order.

        As bytes, and not by torch's `all_gather_object`: that unpickles what comes, and with it would run whatever a
        process that made itself a peer has sent.
        """
        if self.size == 1:
            return [value]
        own = value.encode(errors="surrogatepass")
        on = device_for_small_things(self.group)
        with self._waiting(), naming_the_wait(self.rank, what):
            sizes = torch.zeros(self.size, 1, dtype=torch.int64, device=on)
            size = torch.tensor([len(own)], dtype=torch.int64, device=on)
            dist.all_gather(list(sizes.unbind()), size, group=self.group)
            lengths = sizes.flatten().tolist()
            self._refuse_impossible(lengths, what)
            longest = max(*lengths, 1)
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else 0
            everyones = torch.empty(self.size, longest, dtype=torch.uint8, device=on)
            dist.all_gather(list(everyones.unbind()), padded.to(on), group=self.group)
        texts = zip(everyones.cpu().numpy(), lengths, strict=True)
        try:
            return [text[:length].tobytes().decode(errors="surrogatepass") for text, length in texts]
        except UnicodeDecodeError as error:
            raise PeerLost(f"rank {self.rank} got what is no text in {what}: {error}") from None

    def _refuse_impossible(self, lengths: list[int], what: str) -> None:
        """Before memory is made for it."""
        if min(lengths) < 0 or max(lengths) > _LONGEST_TEXT:
            raise PeerLost(
                f"rank {self.rank} was told of texts of {min(lengths)} to {max(lengths)} bytes in {what}, and at most "
                f"{_LONGEST_TEXT} can be"
            )

    def twin(self, deadline_seconds: float) -> Group:
        """The whole world again, for another thread; a collective call of all its ranks."""
        if self.size == 1:
            return Group(None, 0, 1)
        return Group(group_of(None, deadline_seconds), self.rank, self.size)


def group_of(
    ranks: Sequence[int] | None, deadline_seconds: float, device: torch.device = CPU
) -> dist.ProcessGroup:
    """A process group of these ranks (None: all), for tensors of the host and of such a device. All ranks call it.

    Every group has a deadline: torch's own are 10 and 30 minutes.
    """
    made: dist.ProcessGroup = dist.new_group(
        None if ranks is None else list(ranks),
        timeout=timedelta(seconds=deadline_seconds),
        backend=backends_for(device),
    )
    return made


def node_group(
    everyone: Group, node: int, local_rank: int, device: torch.device, deadline_seconds: float
) -> Group:
    """The ranks of this node; every rank of the team must call it."""
    told = [json.loads(text) for text in everyone.gather(json.dumps([node, local_rank]), "finding nodes")]
    nodes: dict[int, list[int]] = {}
    for rank in sorted(range(everyone.size), key=lambda rank: told[rank]):
        nodes.setdefault(told[rank][0], []).append(rank)
    if len(nodes) == 1 and nodes[node] == list(range(everyone.size)):
        return everyone
    return part_of(everyone, nodes.values(), device, deadline_seconds)


def part_of(
    everyone: Group, parts: Iterable[Sequence[int]], device: torch.device, deadline_seconds: float
) -> Group:
    """This rank's of the parts that all ranks fall into; all ranks make all parts, in the same order."""
    made = [(ranks, group_of(ranks, deadline_seconds, device)) for ranks in parts]
    ranks, group = next((ranks, group) for ranks, group in made if everyone.rank in ranks)
    return Group(group, list(ranks).index(everyone.rank), len(ranks))


@contextlib.contextmanager
def naming_the_wait(rank: int, what: str) -> Iterator[None]:
    """Turn a backend's failure into words; the launcher knows, and adds, who was missing."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(f"rank {rank} lost its peers in {what}: {_first_line(error)}") from error
