"""A place of a lab, seen from outside: its first process, and how it is made and ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dure.base.errors import DureError
from dure.base.lines import LineError, Lines, decode, encode
from dure.tools.lab import namespaces
from dure.tools.lab.machine import SETUP_SECONDS

_LOOK_SECONDS = 0.05
_PROGRAM = [sys.executable, "-I", "-S", str(Path(namespaces.__file__).resolve())]


@dataclass(frozen=True)
class Bind:
    """A file or folder of the machine at a path of a place."""

    source: Path
    target: str
    writable: bool = False


@dataclass(frozen=True)
class Cover:
    """A folder that is empty in a place, but for the `kept`; None: everything that is in it now is kept."""

    folder: str
    kept: tuple[str, ...] | None = ()
    mode: str = "1777"


@dataclass(frozen=True)
class Order:
    """How a place is to be: its name, and what it has of its own beside network, host names and /dev/shm."""

    host: str
    hosts: str
    """The text of its /etc/hosts."""
    covers: tuple[Cover, ...] = ()
    binds: tuple[Bind, ...] = ()
    processes: bool = True
    """Whether it counts its processes by itself, so that all end with the first."""

    def to_line(self) -> bytes:
        """The message to the program that makes the place."""
        return encode(
            "Order",
            {
                "host": self.host,
                "hosts": self.hosts,
                "processes": self.processes,
                "covers": [
                    (cover.folder, cover.kept, cover.mode) for cover in (Cover("/dev/shm"), *self.covers)
                ],
                "binds": [(str(bind.source), bind.target, bind.writable) for bind in self.binds],
            },
        )


@dataclass(frozen=True)
class Place:
    """The first process of a place. Its pid and start time name it for good: a pid alone may be another's by now."""

    host: str
    pid: int
    started: int

    @property
    def alive(self) -> bool:
        """Whether the place is there."""
        return namespaces.start_time(self.pid) == self.started

    def pids(self) -> list[int]:
        """The processes of the place, but for its first, as the outside numbers them."""
        return [pid for pid in _processes_in(self._space()) if pid != self.pid]

    def _space(self) -> str:
        return os.readlink(f"/proc/{self.pid}/ns/pid")

    def within(self, *spaces: str) -> list[str]:
        """The command that becomes, in these namespaces of the place, the command that follows it."""
        return ["nsenter", "--target", str(self.pid), *(f"--{space}" for space in spaces), "--"]

    def command(self, lab: str, arguments: Sequence[str]) -> list[str]:
        """The command line that runs `arguments` in the place and ends with them."""
        return [*_PROGRAM, "enter", str(self.pid), str(self.started), lab, "--", *arguments]


def end_all(places: Iterable[Place]) -> None:
    """Kill the first process of each place, and with it all others; return when they are gone."""
    with contextlib.ExitStack() as handles:
        killed: dict[int, tuple[Place, str]] = {}
        for place in places:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                handle = os.pidfd_open(place.pid)
                handles.callback(os.close, handle)
                space = place._space()
                if (
                    place.alive
                ):  # asked while the handle holds whoever has that pid, so the kill hits nobody else
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    killed[handle] = place, space
        deadline = time.monotonic() + SETUP_SECONDS
        for handle, (place, space) in killed.items():
            while not select.select([handle], [], [], _LOOK_SECONDS)[0]:
                # The kernel lets the first process of a PID namespace end only after all others, and those that were
                # brought in from outside only when somebody outside, maybe a careless init, has taken note of it.
                left = [pid for pid in _processes_in(space) if pid != place.pid]
                if not left and not os.path.islink(f"/proc/{place.pid}/ns/mnt"):
                    break
                if time.monotonic() > deadline:
                    who = ", ".join(map(str, left or [place.pid]))
                    raise DureError(
                        f"{place.host}: process {who} has not ended {SETUP_SECONDS:.0f} s after kill -9"
                    )


def _processes_in(space: str) -> list[int]:
    """The processes that live in a PID namespace."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and namespaces.start_time(name):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{name}/ns/pid") == space:
                    found.append(int(name))
    return found


@dataclass(frozen=True)
class StartingPlace:
    """A place that is being made, and ends with this process unless it is told to stay."""

    order: Order
    process: subprocess.Popen[bytes] = field(repr=False)
    lines: Lines = field(repr=False)

    def wait(self) -> Place:
        """The place, once it is up."""
        try:
            name, fields = decode(self.lines.next(SETUP_SECONDS))
        except LineError as error:
            raise DureError(f"{self.order.host} cannot be set up: {error}") from None
        if name != namespaces.UP:
            raise DureError(f"{self.order.host} cannot be set up: {fields.get('why', name)}")
        pid = int(fields["pid"])
        return Place(self.order.host, pid, namespaces.start_time(pid))

    def stay(self) -> None:
        """Let the place outlive this process."""
        self.lines.send(encode(namespaces.STAY))

    def let_go(self) -> None:
        """Close the connection with the place, which ends unless it was told to stay."""
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr]
        try:
            self.process.wait(SETUP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(SETUP_SECONDS)


def make_place(order: Order) -> StartingPlace:
    """Start the first process of a place, which makes the rest; `wait` for it."""
    process = subprocess.Popen(
        [*_PROGRAM, "init"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,  # Ctrl-C in the terminal is for us; a place ends when we say so
    )
    assert process.stdin is not None
    assert process.stdout is not None
    lines = Lines(process.stdout.fileno(), process.stdin.fileno())
    lines.send(order.to_line())  # one that has ended already says so in `wait`
    return StartingPlace(order, process, lines)
