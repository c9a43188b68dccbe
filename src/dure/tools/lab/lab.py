"""The documents' picture on one machine: nodes, a login, a switch between them, shared storage."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from dure.base.errors import DureError, UsageError
from dure.tools.lab import network, remote
from dure.tools.lab import state as states
from dure.tools.lab.machine import why_not_here
from dure.tools.lab.place import Bind, Cover, Order, Place, StartingPlace, end_all, make_place
from dure.tools.lab.state import State

SHARED = "/mnt/shared"
"""Where places see the storage: nodes read-only, but for `checkpoints`; the login read-write."""
CHECKPOINTS = "checkpoints"
_MOST_NODES = 64


@dataclass(frozen=True)
class PlaceStatus:
    """One place, as it is now."""

    name: str
    address: str
    alive: bool
    joined: bool
    """Whether its cable is plugged in."""
    pid: int
    """Its first process."""
    processes: int
    """How many run in it, beside that one."""


class Lab:
    """A cluster on this machine (root, Linux), named so that several can be there.

    Within `with` it belongs to this process, and is gone with it whatever happens. `up` makes one that stays until
    `down`.
    """

    def __init__(
        self,
        name: str = "lab",
        *,
        nodes: int = 2,
        rate: str | None = None,
        storage: Path | str | None = None,
        ssh: bool = True,
        shown: Sequence[Path | str] = (),
    ) -> None:
        """`rate` shapes every cable, both ways; `storage` is the folder that is shared, made if it is not there.

        `shown` are folders under /tmp that nodes see too, though their /tmp is their own.
        """
        if not 1 <= nodes <= _MOST_NODES:
            raise UsageError(f"a lab of {nodes} nodes cannot be; use 1 to {_MOST_NODES}")
        if rate is not None:
            network.bits_per_second(rate)
        self.name = name
        self.folder = states.lab_folder(name)
        self._rate = rate
        self._storage = Path(storage or "shared").absolute()
        self._ssh = ssh
        self._shown = (*(str(Path(path).absolute()) for path in shown), *_ours())
        names = [network.node_name(number) for number in range(nodes)]
        self._addresses = {network.LOGIN: network.LOGIN_ADDRESS} | {
            name: network.node_address(number) for number, name in enumerate(names)
        }
        self._starting: list[StartingPlace] = []

    @classmethod
    def find(cls, name: str = "lab") -> Lab:
        """The lab of this name that is up."""
        state = states.read_state(states.lab_folder(name))
        if state is None:
            others = ", ".join(states.all_names())
            hint = f"there is {others}" if others else "make one with `dure lab up`"
            raise UsageError(f"there is no lab {name!r}; {hint}")
        return cls(name, nodes=len(state.nodes), rate=state.rate, storage=state.storage, ssh=state.ssh)

    @property
    def ssh_config(self) -> Path:
        """For `ssh -F`: from the login or a node to any other place."""
        return self.folder / "ssh_config"

    @property
    def addresses(self) -> dict[str, str]:
        """The address of every place, the login first."""
        return dict(self._addresses)

    def up(self) -> None:
        """Make the places; they stay until `down`. What is left of an earlier lab that failed is cleared away."""
        self._make()
        for place in self._starting:
            place.stay()
        self._let_go()

    def down(self) -> None:
        """End every process in every place and remove all files. Does nothing where there is no lab."""
        if not self.folder.exists():
            self._let_go()
            return
        with states.locked(self.folder):
            self._clear()
            self._let_go()

    def __enter__(self) -> Lab:
        self._make()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def command(self, place: str, arguments: Sequence[str]) -> list[str]:
        """The command line that runs `arguments` in a place: same folder, environment, streams, signals, exit code."""
        found = self._place(place)
        if not found.alive:
            raise DureError(f"{place} is gone: its first process has ended; `dure lab down`, then `up` again")
        return found.command(self.name, arguments)

    def cut(self, *nodes: str) -> None:
        """Pull the cables of these nodes."""
        self._set_cables(nodes, joined=False)

    def heal(self, *nodes: str) -> None:
        """Plug the cables of these nodes in again; of all when none is named."""
        self._set_cables(nodes or tuple(node.host for node in self.state.nodes), joined=True)

    @property
    def state(self) -> State:
        """What is written down about the lab."""
        state = states.read_state(self.folder)
        if state is None:
            raise UsageError(f"there is no lab {self.name!r}; make one with `dure lab up`")
        return state

    def status(self) -> list[PlaceStatus]:
        """Every place, as it is now."""
        state = self.state
        joined = network.joined_nodes(state.login) | {network.LOGIN} if state.login.alive else set()
        return [
            PlaceStatus(
                place.host,
                self._addresses[place.host],
                place.alive,
                place.alive and place.host in joined,
                place.pid,
                len(place.pids()) if place.alive else 0,
            )
            for place in state.places
        ]

    def _make(self) -> None:
        reason = why_not_here() or (remote.why_no_ssh() if self._ssh else None)
        if reason is not None:
            raise UsageError(f"cannot make a lab here: {reason}")
        with states.locked(self.folder):
            earlier = states.read_state(self.folder)
            if earlier is not None and earlier.running:
                raise UsageError(
                    f"lab {self.name!r} is up already; end it with `dure lab down`, or name another"
                )
            self._clear(keep_folder=True)
            try:
                self._build()
            except BaseException:
                self._let_go()
                self._clear()
                raise

    def _build(self) -> None:
        try:
            (self._storage / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"cannot use {self._storage} as the storage: {error.strerror} ({error.filename}); give another folder"
            ) from None
        if self._ssh:
            remote.prepare(self.folder, self._addresses, self.name)
        self._starting += [make_place(self._order(name)) for name in self._addresses]
        login, *nodes = (place.wait() for place in self._starting)
        state = State(str(self._storage), self._rate, self._ssh, login, tuple(nodes))
        states.write_state(self.folder, state)
        network.lay_cables(login, nodes, self._addresses, self._rate)
        if self._ssh:
            for place in state.places:
                remote.start(self.folder, place, self.name)
        states.write_state(self.folder, replace(state, whole=True))

    def _order(self, place: str) -> Order:
        """The login is where a person works; a node has /tmp, shared memory and read-only storage of its own."""
        is_node = place != network.LOGIN
        covers = [Cover("/mnt", None, "0755"), Cover("/run", None, "0755")]
        binds = [Bind(self._storage, SHARED, writable=not is_node)]
        if is_node:
            own = (str(self.folder),) if self.folder.is_relative_to("/tmp") else ()
            covers.append(Cover("/tmp", (*own, *self._shown)))
            binds.append(Bind(self._storage / CHECKPOINTS, f"{SHARED}/{CHECKPOINTS}", writable=True))
        if self._ssh:
            empty = self.folder / "empty"  # where sshd puts those who have not said who they are
            empty.mkdir(mode=0o755, exist_ok=True)
            binds.append(Bind(empty, "/run/sshd"))
            config = remote.client_config(self.folder)
            if config is not None:
                binds.append(Bind(*config))
        return Order(place, network.host_names(self._addresses), tuple(covers), tuple(binds))

    def _place(self, name: str) -> Place:
        places = {place.host: place for place in self.state.places}
        if name not in places:
            raise UsageError(f"lab {self.name!r} has no place {name!r}; it has {', '.join(places)}")
        return places[name]

    def _set_cables(self, nodes: Sequence[str], *, joined: bool) -> None:
        for node in nodes:
            if self._place(node).host == network.LOGIN:
                raise UsageError("the login has no cable: it is where the switch stands; name a node")
        for node in nodes:
            network.set_cable(self.state.login, node, joined=joined)

    def _clear(self, *, keep_folder: bool = False) -> None:
        """End the places that are written down, and remove the files. Holds the lock."""
        state = states.read_state(self.folder)
        end_all(state.places if state is not None else ())
        for path in self.folder.iterdir() if keep_folder else ():
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink()
        if not keep_folder:
            states.remove(self.folder)

    def _let_go(self) -> None:
        for place in self._starting:
            with contextlib.suppress(OSError):
                place.let_go()
        self._starting.clear()


def _ours() -> list[str]:
    """Where this interpreter and this `dure` are, as far as that is below /tmp, which nodes have of their own."""
    source = Path(__file__).resolve().parents[3]
    project = source.parent if (source.parent / "pyproject.toml").exists() else source
    found = {str(Path(path).resolve()) for path in (sys.prefix, sys.base_prefix, project)}
    below = sorted(path for path in found if Path(path).is_relative_to("/tmp"))
    return [
        path for path in below if not any(path != other and path.startswith(f"{other}/") for other in below)
    ]
