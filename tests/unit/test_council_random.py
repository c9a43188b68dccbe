"""Whatever nodes say, in whatever order: the membership code does not crash, and keeps its promises."""

import random

import pytest
from random_messages import FACTS, a_line

from dure.launch.nodes.membership import Council, Terms
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
    """A council among nodes that say anything; what it answers is looked at after each event."""

    def __init__(self, draw):
        nodes = draw.randrange(1, 5)
        self.nodes = nodes
        fewest = draw.randrange(1, nodes + 1)
        terms = Terms(nodes, fewest, FACTS, "/run", 300.0, draw.randrange(4), draw.random() < 0.5)
        self.council = Council(terms, 0.0, str, lambda restart: None)
        self.now = 0.0
        self.last_team = 0
        self.values = 0

    def event(self, draw):
        self.now += draw.choice([0.0, 0.1, 1.0, 5.0, draw.choice([0.1, 400.0])])
        node = draw.randrange(self.nodes)
        was_over = self.council.ended
        before = set(self.council.members)
        match draw.random():
            case chance if chance < 0.1:
                letters = self.council.tick(self.now)
            case chance if chance < 0.17:
                letters = self.council.lost(node, "gone", self.now)
            case _:
                letters = self.hear(node, a_line(draw, self.nodes))
        self.look(letters, before, was_over)

    def hear(self, node, line):
        """As the leader's connections do it: what is no message costs the node its connection."""
        try:
            message = decode(line)
        except Garbled as error:
            return self.council.lost(node, str(error), self.now)
        if isinstance(message, Hello):
            return self.council.hello(message, self.now)
        if isinstance(message, Bye):
            return self.council.lost(node, message.why, self.now)
        return self.council.heard(node, message, self.now)

    def look(self, letters, before, was_over):
        members = set(self.council.members)
        assert all(node < self.nodes for node in members)
        for node, message in letters:
            assert decode(encode(message)) == message
            assert node in members | before or isinstance(message, Refused)
            assert not was_over or isinstance(message, Refused), "a run that is over says nothing more"
        teams = [message for _, message in letters if isinstance(message, Team)]
        if any(team.store_port == 0 and team.node == 0 for team in teams):
            assert len(teams) == 1
            assert teams[0].number == self.last_team + 1
            self.last_team += 1
        for team in teams:
            assert team.number == self.last_team
            assert team.nodes <= len(members)
            assert team.first_rank + team.local_ranks <= team.ranks
        if self.council.ended and not was_over:
            assert {node for node, message in letters if isinstance(message, End)} == members
        self.council.missing()

    def settle(self):
        """When nobody says anything any more, the run ends, or goes on with those who are there."""
        self.now += 10_000
        was_over = self.council.ended
        letters = self.council.tick(self.now)
        self.look(letters, set(self.council.members), was_over)
        for node in sorted(self.council.members):
            letters = self.council.lost(node, "gone", self.now)
        assert self.council.ended or not self.council.members


def try_sequences(seeds):
    for seed in seeds:
        draw = random.Random(seed)
        run = Run(draw)
        try:
            if draw.random() < 0.7:  # a team, so that there is something to disturb
                for node in range(run.nodes):
                    run.hear(node, encode(Hello(node, f"node{node}", f"10.0.1.{10 + node}", 4, FACTS)))
                    letters = run.hear(node, encode(Ready()))
                    run.look(letters, set(), False)
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
