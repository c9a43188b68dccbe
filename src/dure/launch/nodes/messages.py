"""What agents tell each other: typed values, each a line of its name and JSON. Nothing is ever unpickled.

This is the only place where bytes of a connection become values. Every field has a type and a range; a number is never
taken for another kind of number, nor a truth value for a number; JSON that is nested too deeply is refused like any
other. What is too long for people to read is cut.
"""

from __future__ import annotations

import json
from dataclasses import asdict, field
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from dure.base.errors import DureError, RankFailed, Resumable

VERSION = 2
HELLO_BYTES = 64 * 1024
"""The longest line of a node that has not been welcomed."""
MESSAGE_BYTES = 16 * 1024 * 1024
"""The longest line of one that has."""

_CONFIG = ConfigDict(strict=True, extra="forbid")
_MOST_NODES = 1 << 16
_MOST_LOCAL_RANKS = 1 << 16
_MOST_RANKS = _MOST_NODES * _MOST_LOCAL_RANKS
_HOST_CHARACTERS = 255
_WORDS_CHARACTERS = 8_000
_DETAILS_CHARACTERS = 200_000

Node = Annotated[int, Field(ge=0, lt=_MOST_NODES)]
Rank = Annotated[int, Field(ge=-1, lt=_MOST_RANKS)]
"""-1: no rank in particular."""
LocalRanks = Annotated[int, Field(ge=1, le=_MOST_LOCAL_RANKS)]
"""Of one node."""
TeamNumber = Annotated[int, Field(ge=0, lt=1 << 53)]
Step = Annotated[int, Field(ge=-1, lt=1 << 53)]
"""-1: none yet."""
Port = Annotated[int, Field(ge=0, lt=1 << 16)]
ExitCode = Annotated[int, Field(ge=0, lt=256)]
Host = Annotated[str, Field(max_length=_HOST_CHARACTERS)]
Address = Annotated[str, Field(pattern=r"^[0-9]{1,3}(\.[0-9]{1,3}){3}$")]
Folder = Annotated[str, Field(max_length=4096)]
Words = Annotated[str, AfterValidator(lambda text: text[:_WORDS_CHARACTERS])]
"""A sentence or two for people."""
Details = Annotated[str, AfterValidator(lambda text: text[-_DETAILS_CHARACTERS:])]
"""A traceback, or the end of a log: of which the end tells most."""
Fact = Annotated[str, Field(max_length=1024)]


class Garbled(DureError):
    """A message that no agent of this version sends."""


@dataclass(frozen=True, config=_CONFIG)
class Hello:
    """From a node that wants to take part."""

    node: Node
    """Its number among the nodes, from 0, which is the leader's."""
    host: Host
    address: Address
    ranks: LocalRanks
    facts: Annotated[dict[Fact, Fact], Field(max_length=32)]
    """What must be the same on all nodes: versions, and the digest of the job."""
    version: Annotated[int, Field(ge=0, lt=1 << 16)] = VERSION


@dataclass(frozen=True, config=_CONFIG)
class Welcome:
    """To a node that may: where the run keeps its files."""

    run: Folder


@dataclass(frozen=True, config=_CONFIG)
class Refused:
    """To a node that may not."""

    why: Words
    may_pass: bool = False
    """Whether asking again may help: its number is taken by a node that may just be lost."""


@dataclass(frozen=True, config=_CONFIG)
class Alive:
    """Said by everyone, every second or so."""

    step: Step = -1
    """The furthest step that a rank of this node has been in."""


@dataclass(frozen=True, config=_CONFIG)
class Ready:
    """From a node that has no rank running, and waits for a team."""


@dataclass(frozen=True, config=_CONFIG)
class Team:
    """To a node: start ranks. Only this node's part, so that all of them together grow with the nodes, not squared."""

    number: TeamNumber
    node: Node
    """Which of the team's nodes this one is."""
    nodes: Annotated[int, Field(ge=1, le=_MOST_NODES)]
    first_rank: Annotated[int, Field(ge=0, lt=_MOST_RANKS)]
    """The lowest rank of this node."""
    local_ranks: LocalRanks
    ranks: Annotated[int, Field(ge=1, le=_MOST_RANKS)]
    """All ranks."""
    leader: Address
    store_port: Port
    """Where the ranks meet, on the leader's address; 0: open one and say where."""
    restarts: Annotated[int, Field(ge=0, lt=1 << 31)]
    where: str = ""
    """The map of ranks and hosts, in one line, for the user; on the leader's node only."""


@dataclass(frozen=True, config=_CONFIG)
class StoreUp:
    """From the leader's node: the ranks of a team can meet here."""

    team: TeamNumber
    port: Port


@dataclass(frozen=True, config=_CONFIG)
class Fault:
    """From a node: something went wrong with a rank of a team."""

    team: TeamNumber
    message: Words
    rank: Rank
    host: Host
    details: Details
    exit_code: ExitCode
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


@dataclass(frozen=True, config=_CONFIG)
class Done:
    """From a node: all ranks of a team have ended well, and these are their values."""

    team: TeamNumber
    values: Annotated[list[Any], Field(max_length=_MOST_LOCAL_RANKS)]


@dataclass(frozen=True, config=_CONFIG)
class Again:
    """To a node: end the ranks of a team, and wait for another."""

    team: TeamNumber
    cause: Words


@dataclass(frozen=True, config=_CONFIG)
class End:
    """To a node: the run is over; well, if there is no message."""

    message: Words = ""
    exit_code: ExitCode = 0
    rank: Rank = -1
    host: Host = ""
    details: Details = ""

    def error(self) -> DureError | None:
        """What the command ends with; None when all went well."""
        if not self.message:
            return None
        if self.exit_code == Resumable.exit_code:
            return Resumable(self.message)
        return RankFailed(
            self.message, rank=self.rank, host=self.host, details=self.details, exit_code=self.exit_code
        )


@dataclass(frozen=True, config=_CONFIG)
class Bye:
    """From a node that leaves on purpose, and why."""

    why: Words = field(default="")


Message = Hello | Welcome | Refused | Alive | Ready | Team | StoreUp | Fault | Done | Again | End | Bye
_KINDS = (Hello, Welcome, Refused, Alive, Ready, Team, StoreUp, Fault, Done, Again, End, Bye)
_PARSERS: dict[bytes, TypeAdapter[Message]] = {kind.__name__.encode(): TypeAdapter(kind) for kind in _KINDS}


def encode(message: Message) -> bytes:
    """One line: the message's name and its fields."""
    fields = json.dumps(asdict(message), ensure_ascii=False)
    # A path or a log may hold half a surrogate pair, which is no text that another program would take.
    return f"{type(message).__name__} {fields}\n".encode(errors="replace")


def decode(line: bytes) -> Message:
    """The inverse; raises Garbled."""
    name, _, fields = line.partition(b" ")
    parser = _PARSERS.get(name)
    if parser is None:
        raise Garbled(f"not a message of this version of dure: {line[:80]!r}")
    try:
        return parser.validate_json(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "JSON"
        raise Garbled(f"not a {name.decode()} of this version of dure ({where}: {first['msg']})") from None
