"""Addresses and interfaces: which of this node's is on the way to the leader. Never a silent localhost."""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import re
import socket
import struct

from dure.base.errors import UsageError

_SIOCGIFCONF = 0x8912
_IFREQ = 40


def split_leader(text: str) -> tuple[str, int]:
    """`10.0.1.10:29400` or `[fd00::10]:29400` as host and port."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:\[\]]+)):([0-9]{1,5})", text)
    if match is None or not 0 < int(match[3]) < 65536:
        raise UsageError(
            f"--leader is {text!r}; give the leader's address and a port, as in 10.0.1.10:29400 or [fd00::10]:29400"
        )
    return match[1] or match[2], int(match[3])


def resolve(host: str) -> str:
    """The address of the leader, by which all nodes reach it."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        address = _address_of(host)
    except OSError as error:
        raise UsageError(
            f"the leader's name {host!r} cannot be resolved here: {error.strerror or error}; give its address"
        ) from None
    if ipaddress.ip_address(address).is_loopback:
        # Debian writes 127.0.1.1 for a host's own name: every node would take itself for the leader.
        raise UsageError(
            f"the leader's name {host!r} resolves to {address}, this machine's loopback, which other nodes cannot "
            "reach; give the leader's address, or correct /etc/hosts"
        )
    return address


def _address_of(host: str) -> str:
    """IPv4 where a name has both."""
    try:
        return socket.gethostbyname(host)
    except OSError:
        try:
            return str(socket.getaddrinfo(host, None, socket.AF_INET6, socket.SOCK_STREAM)[0][4][0])
        except OSError:
            pass
        raise


def address_towards(leader: str) -> str:
    """This node's own address on the route to the leader."""
    with socket.socket(family_of(leader), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((leader, 9))
        except OSError as error:
            raise UsageError(f"there is no route to the leader {leader}: {error.strerror or error}") from None
        return str(probe.getsockname()[0])


def interfaces() -> dict[str, str]:
    """Interface → IPv4 address, of those that have one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        buffer = array.array("B", bytes(_IFREQ * 256))
        request = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
        length = struct.unpack("iL", fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, request))[0]
    found: dict[str, str] = {}
    data = buffer.tobytes()
    for start in range(0, length, _IFREQ):
        name = data[start : start + 16].split(b"\0", 1)[0].decode()
        found.setdefault(name, socket.inet_ntoa(data[start + 20 : start + 24]))
    return found


def interfaces6() -> dict[str, str]:
    """Interface → IPv6 address, of those that have one that others reach them by."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as lines:
        for line in lines:
            digits, *_, name = line.split()
            address = ipaddress.IPv6Address(int(digits, 16))
            if not address.is_link_local:  # which would need the other side's name of the interface
                found.setdefault(name, str(address))
    return found


def family_of(address: str) -> socket.AddressFamily:
    """Of an address: IPv6 or IPv4."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def choose_interface(leader: str, wanted: str | None) -> tuple[str, str]:
    """(interface, address) that this node's ranks talk over."""
    known = interfaces6() if family_of(leader) == socket.AF_INET6 else interfaces()
    if wanted is not None:
        if wanted not in known:
            there = ", ".join(f"{name} ({address})" for name, address in sorted(known.items()))
            raise UsageError(
                f"cluster.interface is {wanted!r}, which this node does not have, or not with an address; it "
                f"has {there}"
            )
        return wanted, known[wanted]
    address = address_towards(leader)
    # On the leader itself the kernel routes to its own address over lo; the interface is the one that has it.
    for name, held in known.items():
        if held == address:
            return name, address
    raise UsageError(
        f"no interface of this node has the address {address}, from which it reaches the leader {leader}; "
        "set cluster.interface"
    )
