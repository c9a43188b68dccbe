"""`dure lab …`. Imports nothing heavy."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dure.base.errors import UsageError
from dure.cli.options import Json

if TYPE_CHECKING:
    from dure.tools.lab import Lab

lab = typer.Typer(
    name="lab",
    no_args_is_help=True,
    help="""A cluster on this machine: nodes node0 (10.0.1.10), node1 (10.0.1.11), … and a login (10.0.1.1) on one
    switch, each with a network, mounts, processes and a host name of its own. Takes root, and Linux.

    \b
    dure lab up --nodes 2 --rate 10gbit
    dure lab exec node0 -- ip address
    dure lab cut node1; dure lab heal
    dure lab down
    """,
)

Name = Annotated[str, typer.Option(help="Which lab, where there are several.")]


@lab.command()
def up(
    nodes: Annotated[int, typer.Option(help="How many nodes.")] = 2,
    rate: Annotated[
        str | None,
        typer.Option(help="Shape each node's cable, both ways: 10gbit, 100mbit.", show_default="unshaped"),
    ] = None,
    storage: Annotated[
        Path,
        typer.Option(
            help="The folder that is /mnt/shared on every node: read-only, but for checkpoints/. Made if missing."
        ),
    ] = Path("shared"),
    ssh: Annotated[bool, typer.Option(help="An sshd in every place.")] = True,
    name: Name = "lab",
) -> None:
    """Make the nodes; they stay until `dure lab down`."""
    from dure.tools.lab import Lab

    made = Lab(name, nodes=nodes, rate=rate, storage=storage, ssh=ssh)
    made.up()
    _print_status(made)


@lab.command(
    "exec",
    # What follows the place is the command's own, options too.
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="Example: dure lab exec node0 -- ip address",
)
def execute(
    place: Annotated[str, typer.Argument(help="node0, node1, …, or login.")],
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="What is run there.")],
    name: Name = "lab",
) -> None:
    """Run a command on a node, in this folder and with this environment; it ends as the command does."""
    from dure.tools.lab import Lab

    command = command[1:] if command[0] == "--" else command
    if not command:
        raise UsageError(f"say what to run, such as: dure lab exec {place} -- hostname")
    there = Lab.find(name).command(place, command)
    sys.stdout.flush()
    os.execv(there[0], there)


@lab.command()
def cut(
    nodes: Annotated[list[str], typer.Argument(metavar="NODE…", help="Whose cable is pulled.")],
    name: Name = "lab",
) -> None:
    """Pull the cable of a node: it sees no carrier, and packets vanish."""
    from dure.tools.lab import Lab

    Lab.find(name).cut(*nodes)


@lab.command()
def heal(
    nodes: Annotated[
        list[str] | None, typer.Argument(metavar="[NODE…]", help="Whose cable is plugged in.")
    ] = None,
    name: Name = "lab",
) -> None:
    """Plug the cables of nodes in again, of all when none is named."""
    from dure.tools.lab import Lab

    Lab.find(name).heal(*(nodes or []))


@lab.command()
def down(name: Name = "lab") -> None:
    """End every process on every node, and leave nothing."""
    from dure.tools.lab import Lab

    Lab(name).down()


@lab.command()
def status(name: Name = "lab", as_json: Json = False) -> None:
    """Show the nodes, their addresses, cables and processes."""
    from dure.tools.lab import Lab

    _print_status(Lab.find(name), as_json)


def _print_status(made: Lab, as_json: bool = False) -> None:
    from dataclasses import asdict

    places = made.status()
    state = made.state
    if as_json:
        about = {"name": made.name, "folder": str(made.folder), "storage": state.storage, "rate": state.rate}
        ssh = str(made.ssh_config) if state.ssh else None
        print(json.dumps({**about, "ssh_config": ssh, "places": [asdict(place) for place in places]}))
        return
    for place in places:
        cable = "joined" if place.joined else "cut"
        life = (
            f"{cable:<8}{place.processes} process(es)" if place.alive else "gone: `dure lab down`, then `up`"
        )
        print(f"{place.name:<8}{place.address:<12}{life}")
    print(f"cables  {state.rate or 'unshaped'}")
    print(f"storage {state.storage} is /mnt/shared")
    if state.ssh:
        print(f"ssh     ssh -F {made.ssh_config} {places[-1].name}")
