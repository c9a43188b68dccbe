"""Descriptions of machines: typed TOML files, those that come with dure and the user's own."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from dure.base.errors import UsageError
from dure.base.files import read_at_most
from dure.base.say import printable
from dure.config.section import Section
from dure.plan.links import Link, Links

FOLDER = Path(__file__).parent / "machines"
LONGEST_FILE = 1 << 20
ETHERNET_SHARE = 1448 / 1538
"""Of the line rate that is left for data: 1,448 of the 1,538 bytes that a full frame of 1,500 takes on the wire."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]


class Node(Section):
    """What one machine has."""

    ranks: Count
    """Ranks that it is meant for: its GPUs, or 1 for a CPU."""
    device: Literal["cpu", "cuda"]
    cores: Count
    """Of the CPU; physical ones."""
    memory_gib: Positive
    """For one rank: of the GPU, or the node's divided by its ranks."""
    tflops: Positive
    """Peak of one rank, in the precision that `precision` names."""
    precision: str
    jitter: NotNegative = 0.02
    """Standard deviation of a rank's step, as a part of it. An assumption, the same everywhere, unless measured."""


class Inside(Section):
    """Between the ranks of a node."""

    gb_per_second: Positive
    """What one rank sends, in one direction."""
    hop_us: NotNegative
    call_us: NotNegative


class Network(Section):
    """Between nodes."""

    gbit: Positive
    """Line rate of all of a node's interfaces together."""
    hop_us: NotNegative
    share: Positive = ETHERNET_SHARE
    """Of the line rate that is left for data."""


class Storage(Section):
    """Where checkpoints go."""

    mb_per_second: Positive
    """From one node."""


class Reliability(Section):
    """How often it fails."""

    node_mtbf_hours: Positive
    restart_seconds: NotNegative = 60.0


class Price(Section):
    """What it costs."""

    usd_per_node_hour: NotNegative


class Machine(Section):
    """One kind of node, and how its nodes are joined."""

    name: str
    source: str
    """Where these figures are from."""
    node: Node
    inside: Inside
    network: Network
    storage: Storage
    reliability: Reliability
    price: Price | None = None

    @property
    def links(self) -> Links:
        """As the model takes them."""
        return Links(
            Link(self.inside.gb_per_second * 1e9, self.inside.hop_us * 1e-6),
            Link(self.network.gbit * 1e9 / 8 * self.network.share, self.network.hop_us * 1e-6),
            self.inside.call_us * 1e-6,
        )


def known_machines() -> list[str]:
    """The names of those that come with dure."""
    return sorted(path.name.removesuffix(".toml") for path in FOLDER.glob("*.toml"))


def load_machine(wanted: str) -> Machine:
    """By the name of one that comes with dure, or from a file."""
    path = FOLDER / f"{wanted}.toml" if wanted in known_machines() else Path(wanted)
    if not path.is_file():
        raise UsageError(
            f"--like {printable(wanted)}: there is no such file, and no such machine; known are "
            f"{', '.join(known_machines())}"
        )
    try:
        text = read_at_most(path, LONGEST_FILE).decode()
        return Machine.model_validate(tomllib.loads(text))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{path}: {where}: {printable(first['msg'])}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as a machine: {printable(str(error))}") from None
