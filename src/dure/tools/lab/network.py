"""The lab's network: a switch in the login's place, and a cable to each node."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from dure.base.errors import DureError, UsageError
from dure.tools.lab.machine import run
from dure.tools.lab.place import Place

LINK = "eth0"
"""A node's interface."""
SWITCH = "switch"
"""The login's interface: the switch itself."""
LOGIN = "login"
LOGIN_ADDRESS = "10.0.1.1"

_QUEUE = "latency 50ms"
_BURST_SECONDS = 1e-3
_LEAST_BURST = 128 * 1024


def node_name(number: int) -> str:
    """The host name of a node."""
    return f"node{number}"


def node_address(number: int) -> str:
    """The address of a node, as the documents have it: 10.0.1.10, 10.0.1.11, …."""
    return f"10.0.1.{10 + number}"


def host_names(addresses: dict[str, str]) -> str:
    """An /etc/hosts in which every place finds every other, and never itself at 127.x."""
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
    return "\n".join(lines) + "\n"


def bits_per_second(rate: str) -> float:
    """Read a rate as `tc` writes it: 10gbit, 2.5gbit, 100mbit."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmg])bit", rate)
    if match is None or float(match[1]) == 0:
        raise UsageError(f"a rate of {rate!r} cannot be; write it as tc does, such as 10gbit or 100mbit")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


def shaping(link: str, rate: str) -> list[str]:
    """The command that lets an interface send at most `rate`.

    What a link of this rate carries in a millisecond may go at once: enough for the kernel's timers to keep the rate,
    and too little to let a bucket of gradients slip through.
    """
    burst = max(_LEAST_BURST, int(bits_per_second(rate) / 8 * _BURST_SECONDS))
    shape = f"tbf rate {rate} burst {burst} {_QUEUE}"
    return ["tc", "qdisc", "replace", "dev", link, "root", *shape.split()]


def lay_cables(login: Place, nodes: Sequence[Place], addresses: dict[str, str], rate: str | None) -> None:
    """Join the nodes to the switch. Everything is made inside the places: not even a name is seen outside."""
    _ip(
        login,
        "link set lo up",
        f"link add {SWITCH} type bridge",
        f"address add {addresses[login.host]}/24 dev {SWITCH}",
        f"link set {SWITCH} up",
    )
    for node in nodes:
        cable = f"link add {node.host} netns {login.pid} type veth peer name {LINK} netns {node.pid}"
        run(["ip", *cable.split()])
        _ip(login, f"link set {node.host} master {SWITCH}", f"link set {node.host} up")
        bring_up(node, addresses[node.host])
        if rate is not None:
            run([*node.within("net"), *shaping(LINK, rate)])
            run([*login.within("net"), *shaping(node.host, rate)])


def bring_up(node: Place, address: str) -> None:
    """Give a node's interface its address."""
    _ip(node, "link set lo up", f"address add {address}/24 dev {LINK}", f"link set {LINK} up")


def set_cable(login: Place, node: str, *, joined: bool) -> None:
    """Plug the switch's end of a node's cable in or out: without it the node sees no carrier, and packets vanish."""
    _ip(login, f"link set {node} {'up' if joined else 'down'}")


def joined_nodes(login: Place) -> set[str]:
    """The nodes whose cable is plugged in."""
    links = json.loads(run([*login.within("net"), "ip", "-json", "link", "show", "type", "veth"]) or "[]")
    return {str(link["ifname"]) for link in links if "UP" in link["flags"]}


def sent_bytes(process: int | str = "self") -> int:
    """Bytes that the node of a process has put on its link."""
    with open(f"/proc/{process}/net/dev") as lines:
        for line in lines:
            name, _, counters = line.partition(":")
            if name.strip() == LINK:
                return int(counters.split()[8])
    raise DureError(f"process {process} has no interface {LINK}; is it on one of the lab's nodes?")


def _ip(place: Place, *commands: str) -> None:
    run([*place.within("net"), "ip", "-batch", "-"], text="\n".join(commands) + "\n")
