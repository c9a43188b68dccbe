"""What happens to a team of many nodes costs as much as there are nodes, never that squared."""

import time
from dataclasses import dataclass

import pytest

from dure.base.errors import UsageError
from dure.comm import group
from dure.comm.topology import Topology
from dure.launch.nodes import leader as leader_module
from dure.launch.nodes.membership import Membership, Terms
from dure.launch.nodes.messages import Ready
from dure.tools.bench import scale


def test_messages_and_bytes_of_a_team_grow_with_its_nodes():
    few, many = scale.simulate(64), scale.simulate(1024)
    for what in scale.EVENTS:
        print(what, few[what], many[what])
        assert many[what]["messages"] <= 2 * 1024
        # Twice, for numbers that are longer.
        assert many[what]["bytes"] <= 2 * 16 * few[what]["bytes"], what


def test_nodes_that_get_ready_are_not_looked_at_by_every_other_that_does():
    class Counted(dict):
        looks = 0

        def values(self):
            self.looks += len(self)
            return super().values()

    members = Counted()
    run = Membership(
        Terms(512, 1, scale.FACTS, "/run", 300.0, 3), 0.0, lambda _: None, lambda _: None, members=members
    )
    for node in range(512):
        run.hello(scale._hello(node), 1.0)
    for node in range(512):
        last = run.heard(node, Ready(), 2.0)
    assert len(last) == 1, "the leader's node opens the store"
    assert members.looks <= 8 * 512


def test_a_leader_looks_over_its_connections_by_the_clock_and_not_by_the_message(monkeypatch):
    looked = []
    look = leader_module.Leader._let_go
    monkeypatch.setattr(
        leader_module.Leader, "_let_go", lambda self, now: (looked.append(now), look(self, now))[1]
    )
    began = time.monotonic()
    costs = scale.over_sockets(24)
    seconds = time.monotonic() - began
    print(costs)
    assert [costs[what]["messages"] for what in scale.EVENTS] == [48, 46, 46, 22]
    # One more for each connection that ended.
    assert len(looked) <= seconds / leader_module._LOOK_SECONDS + 24 + 2


@dataclass
class CountingStore:
    """A store of ranks that have all come, with the requests that it is asked."""

    asked: int = 0

    def set(self, name, value):
        self.asked += 1

    def wait(self, names, deadline):
        self.asked += 1


def test_ranks_that_meet_ask_the_store_as_often_as_there_are_ranks():
    ranks, asked = 256, 0
    for rank in range(ranks):
        store = CountingStore()
        place = Topology(rank, ranks, 0, 1, rank, ranks, "10.0.1.10", 29500, "hand", "run")
        group._wait_for_all(place, store)
        asked += store.asked
    assert asked <= 4 * ranks


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(UsageError, match="2 or more"):
        scale.simulate(1)
    with pytest.raises(UsageError, match="no such part"):
        scale.bench_scale(only=["moon"])
