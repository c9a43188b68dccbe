"""What agents tell each other: typed values, each a line of its name and JSON. Nothing is ever unpickled.

This is the only place where bytes of a connection become values. Every field has a type and a range; a number is never
taken for another kind of number, nor a truth value for a number; JSON that is nested too deeply is refused like any
other. What is too long for people to read is cut.
"""

from __future__ import annotations

from dataclasses import asdict, field, replace
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from dure.base import lines
from dure.base.errors import DureError, Failure, RankFailed, Resumable

VERSION = 4
HELLO_BYTES = 64 * 1024
"""The longest line of a node that has not been welcomed."""
MESSAGE_BYTES = lines.LONGEST
"""The longest line of one that has."""

_CONFIG = ConfigDict(strict=True, extra="forbid")
_MOST_NODES = 1 << 16
_MOST_LOCAL_RANKS = 1 << 16
_MOST_RANKS = _MOST_NODES * _MOST_LOCAL_RANKS
_HOST_CHARACTERS = 255
_WORDS_CHARACTERS = 8_000
_DETAILS_CHARACTERS = 200_000

Node = Annotated[int, Field(ge=0, lt=_MOST_NODES)]
LocalRanks = Annotated[int, Field(ge=1, le=_MOST_LOCAL_RANKS)]
"""Of one node."""
TeamNumber = Annotated[int, Field(ge=0, lt=1 << 53)]
Step = Annotated[int, Field(ge=-1, lt=1 << 53)]
"""-1: none yet."""
Port = Annotated[int, Field(ge=0, lt=1 << 16)]
Host = Annotated[str, Field(max_length=_HOST_CHARACTERS)]
Address = Annotated[str, Field(pattern=r"^([0-9]{1,3}(\.[0-9]{1,3}){3}|[0-9a-f:]{2,39})$")]
Folder = Annotated[str, Field(max_length=4096)]
Words = Annotated[str, AfterValidator(lambda text: text[:_WORDS_CHARACTERS])]
"""A sentence or two for people."""
Fact = Annotated[str, Field(max_length=1024)]


def _bounded(failure: Failure) -> Failure:
    """Refuse numbers out of their range; cut what is too long for people to read. The types are checked before."""
    if not -1 <= failure.rank < _MOST_RANKS:
        raise ValueError(f"rank is {failure.rank}")
    if not 0 <= failure.exit_code < 256:
        raise ValueError(f"exit_code is {failure.exit_code}")
    if not 0 <= failure.at_ns < 1 << 63:
        raise ValueError(f"at_ns is {failure.at_ns}")
    if len(failure.host) > _HOST_CHARACTERS:
        raise ValueError("host is too long")
    return replace(
        failure,
        message=failure.message[:_WORDS_CHARACTERS],
        details=failure.details[-_DETAILS_CHARACTERS:],  # of a traceback or a log, the end tells most
    )


BoundedFailure = Annotated[Failure, AfterValidator(_bounded)]


class Garbled(lines.LineError):
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
    """Of the ranks' store, on the leader's address; 0: open one and say where."""
    restarts: Annotated[int, Field(ge=0, lt=1 << 31)]
    where: str = ""
    """The map of ranks and hosts, in one line, for the user; on the leader's node only."""


@dataclass(frozen=True, config=_CONFIG)
class StoreUp:
    """From the leader's node: the store of a team's ranks is open here."""

    team: TeamNumber
    port: Port


@dataclass(frozen=True, config=_CONFIG)
class Failed:
    """From a node: a rank of a team has failed."""

    team: TeamNumber
    failure: BoundedFailure


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
    """To a node: the run is over; well, if there is no failure."""

    failure: BoundedFailure | None = None

    def error(self) -> DureError | None:
        """What the command ends with; None when all went well."""
        if self.failure is None:
            return None
        if self.failure.exit_code == Resumable.exit_code:
            return Resumable(self.failure.message)
        return RankFailed(self.failure)


@dataclass(frozen=True, config=_CONFIG)
class Bye:
    """From a node that leaves on purpose, and why."""

    why: Words = field(default="")


Message = Hello | Welcome | Refused | Alive | Ready | Team | StoreUp | Failed | Done | Again | End | Bye
_KINDS = (Hello, Welcome, Refused, Alive, Ready, Team, StoreUp, Failed, Done, Again, End, Bye)
_PARSERS: dict[bytes, TypeAdapter[Message]] = {kind.__name__.encode(): TypeAdapter(kind) for kind in _KINDS}


def encode(message: Message) -> bytes:
    """One line: the message's name and its fields."""
    return lines.encode(type(message).__name__, asdict(message))


def decode(line: bytes) -> Message:
    """The inverse; raises Garbled."""
    name, fields = lines.split(line)
    parser = _PARSERS.get(name)
    if parser is None:
        raise Garbled(f"not a message of this version of dure: {line[:80]!r}")
    try:
        return parser.validate_json(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "JSON"
        raise Garbled(f"not a {name.decode()} of this version of dure ({where}: {first['msg']})") from None
