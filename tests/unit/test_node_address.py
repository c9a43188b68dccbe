"""Which address and interface a node uses: found from the route, never guessed to be localhost."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from dure.base.errors import UsageError
from dure.launch.nodes.address import (
    address_towards,
    choose_interface,
    interfaces,
    interfaces6,
    resolve,
    split_leader,
)
from dure.launch.rank_store import store_listener


def test_a_leader_is_an_address_and_a_port():
    assert split_leader("10.0.1.10:29400") == ("10.0.1.10", 29400)
    assert split_leader("node0:29400") == ("node0", 29400)
    assert split_leader("[fd00::10]:29400") == ("fd00::10", 29400)


@pytest.mark.parametrize(
    "text",
    ["10.0.1.10", ":29400", "10.0.1.10:0", "10.0.1.10:99999", "a b:1", "::1:1", "[::1]", "[node0]:1", ""],
)
def test_anything_else_is_refused_with_an_example(text):
    with pytest.raises(UsageError, match=r"10\.0\.1\.10:29400"):
        split_leader(text)


def test_a_name_that_means_this_machine_is_refused_rather_than_believed(monkeypatch):
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    with pytest.raises(UsageError, match=r"resolves to 127\.0\.1\.1"):
        resolve("node0")
    assert resolve("127.0.0.1") == "127.0.0.1"  # who says so means it


def test_a_name_that_nobody_knows_is_named():
    with pytest.raises(UsageError, match="no-such-host"):
        resolve("no-such-host.invalid")


def test_the_interface_is_the_one_that_has_the_address_on_the_route():
    assert interfaces()["lo"] == "127.0.0.1"
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert choose_interface("127.0.0.1", None) == ("lo", "127.0.0.1")


@pytest.mark.skipif("lo" not in interfaces6(), reason="no IPv6 on this machine's loopback")
def test_an_ipv6_leader_is_reached_from_an_ipv6_address():
    assert resolve("::1") == "::1"
    assert resolve("FD00:0:0::10") == "fd00::10"
    assert address_towards("::1") == "::1"
    assert choose_interface("::1", None) == ("lo", "::1")
    with closing(store_listener("::1")) as store:
        assert store.getsockname()[0] == "::1"


def test_an_interface_that_is_not_there_is_answered_with_those_that_are():
    with pytest.raises(UsageError, match=r"'ib7'.*lo \(127\.0\.0\.1\)"):
        choose_interface("127.0.0.1", "ib7")
