"""Whatever nodes say, in whatever order: the membership code does not crash, and keeps its promises."""

import random

import pytest
from support.random_messages import FACTS, a_line

from dure.launch.nodes.membership import Membership, Terms
from dure.launch.nodes.messages import (
    Bye,
    End,
    Garbled,
    Hello,
    Ready,
    Refused,
    StoreUp,
    Team,
    decode,
    encode,
)

EVENTS = 60


class Run:
    """A membership among nodes that say anything; what it answers is looked at after each event."""

    def __init__(self, draw):
        nodes = draw.randrange(1, 5)
        self.nodes = nodes
        fewest = draw.randrange(1, nodes + 1)
        terms = Terms(nodes, fewest, FACTS, "/run", 300.0, draw.randrange(4), draw.random() < 0.5)
        self.membership = Membership(terms, 0.0, str, lambda restart: None)
        self.now = 0.0
        self.last_team = 0
        self.values = 0

    def event(self, draw):
        self.now += draw.choice([0.0, 0.1, 1.0, 5.0, draw.choice([0.1, 400.0])])
        node = draw.randrange(self.nodes)
        was_over = self.membership.ended
        before = set(self.membership.members)
        match draw.random():
            case chance if chance < 0.1:
                outgoing = self.membership.tick(self.now)
            case chance if chance < 0.17:
                outgoing = self.membership.lost(node, "gone", self.now)
            case _:
                outgoing = self.hear(node, a_line(draw, self.nodes))
        self.look(outgoing, before, was_over)

    def hear(self, node, line):
        """As the leader's connections do it: what is no message costs the node its connection."""
        try:
            message = decode(line)
        except Garbled as error:
            return self.membership.lost(node, str(error), self.now)
        if isinstance(message, Hello):
            return self.membership.hello(message, self.now)
        if isinstance(message, Bye):
            return self.membership.lost(node, message.why, self.now)
        return self.membership.heard(node, message, self.now)

    def look(self, outgoing, before, was_over):
        members = set(self.membership.members)
        assert all(node < self.nodes for node in members)
        for node, message in outgoing:
            assert decode(encode(message)) == message
            assert node in members | before or isinstance(message, Refused)
            assert not was_over or isinstance(message, Refused), "a run that is over says nothing more"
        teams = [message for _, message in outgoing if isinstance(message, Team)]
        if any(team.store_port == 0 and team.node == 0 for team in teams):
            assert len(teams) == 1
            assert teams[0].number == self.last_team + 1
            self.last_team += 1
        for team in teams:
            assert team.number == self.last_team
            assert team.nodes <= len(members)
            assert team.first_rank + team.local_ranks <= team.ranks
        if self.membership.ended and not was_over:
            assert {node for node, message in outgoing if isinstance(message, End)} == members
        self.membership.missing()

    def settle(self):
        """When nobody says anything any more, the run ends, or goes on with those who are there."""
        self.now += 10_000
        was_over = self.membership.ended
        outgoing = self.membership.tick(self.now)
        self.look(outgoing, set(self.membership.members), was_over)
        for node in sorted(self.membership.members):
            outgoing = self.membership.lost(node, "gone", self.now)
        assert self.membership.ended or not self.membership.members


def try_sequences(seeds):
    for seed in seeds:
        draw = random.Random(seed)
        run = Run(draw)
        try:
            if draw.random() < 0.7:  # a team, so that there is something to disturb
                for node in range(run.nodes):
                    run.hear(node, encode(Hello(node, f"node{node}", f"10.0.1.{10 + node}", 4, FACTS)))
                    outgoing = run.hear(node, encode(Ready()))
                    run.look(outgoing, set(), False)
                if draw.random() < 0.7:
                    run.look(run.hear(0, encode(StoreUp(1, 4321))), set(), False)
            for _ in range(EVENTS):
                run.event(draw)
            run.settle()
        except Exception as error:
            raise AssertionError(f"sequence {seed}: {type(error).__name__}: {error}") from error


def test_no_sequence_of_messages_crashes_the_membership_code():
    try_sequences(range(1000))


@pytest.mark.soak
def test_none_of_20_000_sequences_of_messages_crashes_the_membership_code():
    try_sequences(range(20_000))
