"""What agents tell each other: typed values, as JSON lines. Nothing is ever unpickled from the network."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from dure.errors import DureError, RankFailed, Resumable

VERSION = 1


class Garbled(DureError):
    """A message that no agent of this version sends."""


@dataclass(frozen=True)
class Hello:
    """From a node that wants to take part."""

    node: int
    """Its number among the nodes, from 0, which is the leader's."""
    host: str
    address: str
    ranks: int
    facts: dict[str, str]
    """What must be the same on all nodes: versions, and the digest of the job."""
    version: int = VERSION


@dataclass(frozen=True)
class Welcome:
    """To a node that may: where the run keeps its files."""

    run: str


@dataclass(frozen=True)
class Refused:
    """To a node that may not."""

    why: str


@dataclass(frozen=True)
class Alive:
    """Said by everyone, every second or so."""

    step: int = -1
    """The furthest step that a rank of this node has been in."""


@dataclass(frozen=True)
class Ready:
    """From a node that has no rank running, and waits for a team."""


@dataclass(frozen=True)
class Team:
    """To a node: start ranks."""

    number: int
    place: int
    """Which of the team's nodes this one is."""
    sizes: list[int]
    """Ranks of each of them."""
    hosts: list[str]
    addresses: list[str]
    store_port: int
    """Where the ranks meet, on the leader's address; 0: open one and say where."""
    restarts: int

    @property
    def first_rank(self) -> int:
        """The lowest rank of this node."""
        return sum(self.sizes[: self.place])

    @property
    def ranks(self) -> int:
        """All ranks."""
        return sum(self.sizes)

    def in_words(self) -> str:
        """The map of ranks and hosts, in one line."""
        first, places = 0, []
        for size, host, address in zip(self.sizes, self.hosts, self.addresses, strict=True):
            which = f"ranks {first}-{first + size - 1}" if size > 1 else f"rank {first}"
            places.append(f"{which} on {host} ({address})")
            first += size
        return ", ".join(places)


@dataclass(frozen=True)
class StoreUp:
    """From the leader's node: the ranks of a team can meet here."""

    team: int
    port: int


@dataclass(frozen=True)
class Fault:
    """From a node: something went wrong with a rank of a team."""

    team: int
    message: str
    rank: int
    host: str
    details: str
    exit_code: int
    may_pass: bool
    aftermath: bool
    """Whether it is only another rank's failure, seen from there."""

    def error(self) -> RankFailed:
        """As an exception."""
        return RankFailed(
            self.message,
            rank=self.rank,
            host=self.host,
            details=self.details,
            exit_code=self.exit_code,
            may_pass=self.may_pass,
            aftermath=self.aftermath,
        )


@dataclass(frozen=True)
class Done:
    """From a node: all ranks of a team have ended well, and these are their values."""

    team: int
    values: list[Any]


@dataclass(frozen=True)
class Again:
    """To a node: end the ranks of a team, and wait for another."""

    team: int
    cause: str


@dataclass(frozen=True)
class End:
    """To a node: the run is over; well, if there is no message."""

    message: str = ""
    exit_code: int = 0
    rank: int = -1
    host: str = ""
    details: str = ""

    def error(self) -> DureError | None:
        """What the command ends with; None when all went well."""
        if not self.message:
            return None
        if self.exit_code == Resumable.exit_code:
            return Resumable(self.message)
        return RankFailed(
            self.message, rank=self.rank, host=self.host, details=self.details, exit_code=self.exit_code
        )


@dataclass(frozen=True)
class Bye:
    """From a node that leaves on purpose, and why."""

    why: str = field(default="")


Message = Hello | Welcome | Refused | Alive | Ready | Team | StoreUp | Fault | Done | Again | End | Bye
_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in (Hello, Welcome, Refused, Alive, Ready, Team, StoreUp, Fault, Done, Again, End, Bye)
}


def encode(message: Message) -> bytes:
    """One line of JSON."""
    return json.dumps([type(message).__name__, asdict(message)]).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The inverse; raises Garbled."""
    try:
        name, values = json.loads(line)
        kind = _KINDS[name]
        if set(values) - {known.name for known in fields(kind)}:
            raise TypeError("unknown fields")
        return kind(**values)
    except (ValueError, KeyError, TypeError) as error:
        raise Garbled(f"not a message of this version of dure: {line[:80]!r} ({error})") from None
