"""How a node is called, and which of its interfaces the ranks will talk over."""

from __future__ import annotations

import ipaddress
import socket

from dure.base.errors import UsageError
from dure.doctor.finding import Finding, bad, good
from dure.doctor.plan import JobNeeds
from dure.launch.nodes.address import choose_interface, interfaces, resolve


def host_name(plan: JobNeeds, node: str) -> Finding:
    """Whether this host's name, and those of all nodes, are addresses that others can reach."""
    own = socket.gethostname()
    for name in dict.fromkeys((own, *map(_without_user, plan.hosts))):
        try:
            address = socket.gethostbyname(name)
        except OSError:
            return bad("name", node, "name.unknown", name=name)
        if ipaddress.ip_address(address).is_loopback and not _all_on_one_machine(plan):
            return bad("name", node, "name.loopback", name=name, address=address)
    return good("name", node, "name.found", name=own, address=socket.gethostbyname(own))


def interface(plan: JobNeeds, node: str) -> tuple[Finding, str | None]:
    """The interface that this node's ranks will talk over, and its address; None where there is none."""
    there = ", ".join(f"{name} ({address})" for name, address in sorted(interfaces().items()))
    try:
        name, address = choose_interface(resolve(_without_user(plan.hosts[0])), plan.interface)
    except UsageError as error:
        values = {"wanted": plan.interface or "-", "reason": str(error), "there": there}
        words = "interface.missing" if plan.interface is not None else "interface.none"
        return bad("interface", node, words, **values), None
    if ipaddress.ip_address(address).is_loopback and not _all_on_one_machine(plan):
        return bad("interface", node, "interface.loopback", name=name, address=address, there=there), None
    return good("interface", node, "interface.chosen", name=name, address=address), address


def _all_on_one_machine(plan: JobNeeds) -> bool:
    """Whoever writes 127.0.0.1 itself for the leader says so."""
    return plan.hosts[0].startswith("127.")


def _without_user(host: str) -> str:
    """`root@node1` is for ssh."""
    return host.rpartition("@")[2]
