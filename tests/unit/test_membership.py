"""The leader's decisions, without a network: who is in a team, when it starts again, when the run is over."""

from __future__ import annotations

import pytest

from dure.base.errors import Failure
from dure.launch.nodes.membership import Membership, Terms
from dure.launch.nodes.messages import (
    Again,
    Alive,
    Done,
    End,
    Failed,
    Hello,
    Ready,
    Refused,
    StoreUp,
    Team,
    Welcome,
    encode,
)
from dure.launch.restart_policy import UnsavedScript

FACTS = {"torch": "2.13.0", "job (sha256)": "abc"}


class Run:
    """A membership, and everything that it has said."""

    def __init__(self, nodes=2, fewest=None, max_restarts=3, **terms):
        terms = Terms(
            nodes,
            fewest or nodes,
            FACTS,
            "/mnt/shared/run",
            join_seconds=300,
            max_restarts=max_restarts,
            **terms,
        )
        self.said, self.restarts = [], []
        self.stopping = False
        self.membership = Membership(
            terms, 0.0, self.said.append, self.restarts.append, lambda: self.stopping
        )

    def come(self, node, now=0.0, **changes):
        hello = Hello(node, f"node{node}", f"10.0.1.{10 + node}", 4, FACTS)
        outgoing = self.membership.hello(Hello(**{**vars(hello), **changes}), now)
        return outgoing + self.membership.heard(node, Ready(), now)

    def form(self, *nodes, now=0.0):
        """Bring the nodes into a running team."""
        outgoing = [letter for node in nodes for letter in self.come(node, now)]
        outgoing += self.membership.tick(now + 60)
        (team,) = [message for _, message in outgoing if isinstance(message, Team)]
        return self.membership.heard(0, StoreUp(team.number, 4321), now)

    def fault(self, team, message, *, now, aftermath=False, may_pass=True, node=1, exit_code=1):
        told = Failed(team, Failure(message, 4, "node1", "", exit_code, may_pass, aftermath))
        return self.membership.heard(node, told, now)


def kinds(outgoing):
    return [(node, type(message).__name__) for node, message in outgoing]


def test_a_team_is_formed_when_all_have_come_and_ranks_follow_the_nodes_numbers():
    run = Run(nodes=3)
    assert kinds(run.come(2)) == [(2, "Welcome")]
    assert run.membership.missing() == "nodes 0, 1 of 3"
    assert kinds(run.come(1)) == [(1, "Welcome")]
    ((_, welcome), (to, team)) = run.come(0)
    assert welcome == Welcome("/mnt/shared/run")
    assert to == 0
    assert (team.node, team.nodes, team.local_ranks, team.ranks, team.store_port) == (0, 3, 4, 12, 0)
    assert team.where == (
        "ranks 0-3 on node0 (10.0.1.10), ranks 4-7 on node1 (10.0.1.11), ranks 8-11 on node2 (10.0.1.12)"
    )
    others = run.membership.heard(0, StoreUp(1, 4321), 1.0)
    assert [(node, team.node, team.first_rank, team.leader, team.store_port) for node, team in others] == [
        (1, 1, 4, "10.0.1.10", 4321),
        (2, 2, 8, "10.0.1.10", 4321),
    ]


def test_forming_a_team_takes_bytes_in_proportion_to_its_nodes():
    def told(nodes):
        run = Run(nodes=nodes)
        outgoing = [letter for node in range(nodes) for letter in run.come(node)]
        outgoing += run.membership.heard(0, StoreUp(1, 4321), 1.0)
        assert len([message for _, message in outgoing if isinstance(message, Team)]) == nodes
        return sum(len(encode(message)) for _, message in outgoing)

    assert told(128) < 2.2 * told(64)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"node": 5}, "--node-rank 5 is not one of 2 nodes"),
        ({"version": 99}, "speaks version 99"),
        ({"facts": {**FACTS, "torch": "2.12.0"}}, "its torch is 2.12.0, the leader's is 2.13.0"),
        ({"facts": {"torch": "2.13.0"}}, "its job (sha256) is None"),
    ],
)
def test_a_node_that_does_not_fit_is_refused_in_words(changes, words):
    run = Run()
    run.come(0)
    ((_, refused),) = run.membership.hello(
        Hello(**{**vars(Hello(1, "node1", "10.0.1.11", 4, FACTS)), **changes}), 0.0
    )
    assert isinstance(refused, Refused)
    assert words in refused.why


def test_a_node_rank_that_is_taken_is_refused_with_the_host_that_has_it():
    run = Run()
    run.come(0)
    ((_, refused),) = run.membership.hello(Hello(0, "other", "10.0.1.12", 4, FACTS), 0.0)
    assert "taken by node0" in refused.why
    assert refused.may_pass, "it may be the node itself, started again before it was missed"


def test_a_full_team_takes_nobody_in():
    run = Run()
    run.form(0, 1)
    for node in range(5):
        ((_, refused),) = run.membership.hello(Hello(node, "other", "10.0.1.99", 4, FACTS), 9.0)
        assert isinstance(refused, Refused)
    assert run.membership.heard(0, Done(1, [None] * 4), 9.5) == []
    assert kinds(run.membership.heard(1, Done(1, [None] * 4), 10.0)) == [(0, "End"), (1, "End")]


def test_only_the_leaders_node_can_say_where_the_ranks_meet():
    run = Run()
    run.come(0)
    run.come(1)
    assert run.membership.heard(1, StoreUp(1, 666), 1.0) == []
    ((node, team),) = run.membership.heard(0, StoreUp(1, 4321), 1.0)
    assert (node, team.store_port) == (1, 4321)


def test_a_node_that_tells_values_of_ranks_it_does_not_have_is_lost():
    run = Run()
    run.form(0, 1)
    outgoing = run.membership.heard(1, Done(1, [1, 2, 3, 4, 5]), 5.0)
    assert [(node, end.failure.exit_code) for node, end in outgoing] == [(0, 75)]
    assert "told 5 values of 4 ranks" in outgoing[0][1].failure.message


def test_nodes_that_are_lost_again_and_again_leave_the_run_resumable():
    run = Run(nodes=2, fewest=1, max_restarts=1)
    run.form(0, 1)
    assert kinds(run.membership.lost(1, "not heard of for 6 s", 1.0)) == [(0, "Again")]
    run.come(1, now=2.0)
    run.membership.heard(0, Ready(), 2.0)
    run.membership.heard(0, StoreUp(2, 4321), 2.0)
    ((node, end),) = run.membership.lost(1, "not heard of for 6 s", 9.0)
    assert (node, end.failure.exit_code) == (0, 75)
    assert "--run-dir /mnt/shared/run" in end.failure.message


def test_who_never_comes_is_named_after_the_deadline():
    run = Run(nodes=3)
    run.come(0)
    run.come(2)
    assert run.membership.tick(299.0) == []
    outgoing = run.membership.tick(301.0)
    assert kinds(outgoing) == [(0, "End"), (2, "End")]
    assert "waiting for node 1 of 3" in outgoing[0][1].failure.message
    assert outgoing[0][1].failure.exit_code == 1


def test_an_elastic_run_waits_a_moment_for_the_others_and_then_starts_without_them():
    run = Run(nodes=2, fewest=1)
    assert kinds(run.come(0)) == [(0, "Welcome")]
    assert run.membership.tick(1.0) == []
    assert kinds(run.membership.tick(9.0)) == [(0, "Team")]


def test_a_lost_node_ends_a_run_that_needs_it_resumable():
    run = Run()
    run.form(0, 1)
    ((node, end),) = run.membership.lost(1, "not heard of for 6 s", 10.0)
    assert node == 0
    assert end.failure.exit_code == 75
    assert "node 1 (node1, 10.0.1.11) is lost (not heard of for 6 s)" in end.failure.message
    assert run.membership.ended


def test_a_lost_node_is_named_and_the_rest_goes_on_at_once():
    run = Run(nodes=2, fewest=1)
    run.form(0, 1)
    run.membership.heard(0, Alive(12), 9.0)
    assert run.membership.lost(1, "not heard of for 6 s", 10.0) == [
        (0, Again(1, "node 1 (node1, 10.0.1.11) is lost: not heard of for 6 s"))
    ]
    assert run.restarts[0].step == 12
    ((_, team),) = run.membership.heard(0, Ready(), 10.1)
    assert (team.number, team.nodes, team.ranks, team.restarts) == (2, 1, 4, 1)
    assert run.membership.missing() == ""


def test_a_node_that_comes_later_joins_and_costs_no_patience():
    run = Run(nodes=2, fewest=1)
    run.form(0)
    outgoing = run.come(1, now=100.0)
    assert kinds(outgoing) == [(1, "Welcome"), (0, "Again")]
    outgoing = run.membership.heard(0, Ready(), 101.0)
    assert kinds(outgoing) == [(0, "Team")]
    assert (outgoing[0][1].nodes, outgoing[0][1].ranks) == (2, 8)
    assert run.restarts == []


def test_a_cause_is_preferred_to_its_aftermath_on_another_node():
    run = Run(max_restarts=0)
    run.form(0, 1)
    assert run.fault(1, "rank 0 lost its peers", now=1.0, aftermath=True, node=0) == []
    outgoing = run.fault(1, "rank 5 ran out of memory", now=2.0)
    assert outgoing[0][1].failure.message == "rank 5 ran out of memory"


def test_an_aftermath_alone_is_believed_after_a_while():
    run = Run(max_restarts=0)
    run.form(0, 1)
    assert run.fault(1, "rank 0 lost its peers", now=1.0, aftermath=True) == []
    assert run.membership.tick(2.0) == []
    assert run.membership.tick(6.0)[0][1].failure.message == "rank 0 lost its peers"


def test_faults_of_an_earlier_team_are_old_news():
    run = Run()
    run.form(0, 1)
    assert kinds(run.fault(1, "rank 5 was killed", now=1.0)) == [(0, "Again"), (1, "Again")]
    for node in (0, 1):
        outgoing = run.membership.heard(node, Ready(), 2.0)
    run.membership.heard(0, StoreUp(outgoing[0][1].number, 1), 2.0)
    assert run.fault(1, "rank 5 was killed", now=3.0) == []


def test_a_run_without_progress_ends_with_the_first_cause():
    run = Run(max_restarts=2)
    run.form(0, 1)
    for team in (1, 2):
        outgoing = run.fault(team, f"rank 5 was killed, {team}", now=team)
        assert kinds(outgoing) == [(0, "Again"), (1, "Again")]
        for node in (0, 1):
            outgoing = run.membership.heard(node, Ready(), team)
        run.membership.heard(0, StoreUp(team + 1, 1), team)
    outgoing = run.fault(3, "rank 5 was killed, 3", now=9)
    assert "rank 5 was killed, 1 The team was started again 2 times" in outgoing[0][1].failure.message


def test_what_the_job_did_wrong_ends_the_run_at_once_with_its_exit_code():
    run = Run()
    run.form(0, 1)
    outgoing = run.fault(1, "the loss is NaN", now=1.0, may_pass=False, exit_code=3)
    assert [(node, end.failure.exit_code) for node, end in outgoing] == [(0, 3), (1, 3)]


def test_a_script_on_several_nodes_is_started_again_once_it_saves_and_is_resumable_then():
    saving = []
    run = Run(resumable=False, script=UnsavedScript(lambda: bool(saving), 0))
    run.form(0, 1)
    saving.append(True)
    assert kinds(run.fault(1, "rank 5 was killed", now=1.0)) == [(0, "Again"), (1, "Again")]
    (end,) = [message for _, message in run.membership.lost(1, "cut off", 2.0)]
    assert end.failure.exit_code == 75
    assert "the same commands go on" in end.failure.message
    stock = Run(resumable=False, script=UnsavedScript(lambda: False, 0))
    stock.form(0, 1)
    assert kinds(stock.fault(1, "rank 5 was killed", now=1.0)) == [(0, "End"), (1, "End")]


def test_the_run_is_over_when_all_nodes_are_done_and_values_are_in_rank_order():
    run = Run()
    run.form(0, 1)
    assert run.membership.heard(1, Done(1, [14, 15, 16, 17]), 5.0) == []
    assert run.membership.heard(0, Done(1, [10, 11, 12, 13]), 6.0) == [(0, End()), (1, End())]
    assert run.membership.values == [10, 11, 12, 13, 14, 15, 16, 17]
    assert End().error() is None


def test_a_node_that_fails_at_the_very_end_takes_those_that_were_done_back_in():
    run = Run()
    run.form(0, 1)
    run.membership.heard(0, Done(1, [10, 11, 12, 13]), 5.0)
    assert kinds(run.fault(1, "rank 5 was killed", now=6.0)) == [(0, "Again"), (1, "Again")]
    assert not run.membership.ended


def test_a_store_that_comes_up_for_a_team_that_fell_apart_is_ignored():
    run = Run(nodes=2, fewest=1)
    for node in (0, 1):
        run.come(node)
    run.membership.lost(1, "the connection was closed", 0.5)
    assert run.membership.heard(0, StoreUp(1, 4321), 0.6) == []
    ((_, team),) = run.membership.heard(0, Ready(), 0.7)
    assert team.number == 2


@pytest.mark.parametrize("what", ["a failed rank", "a lost node"])
def test_once_a_stop_was_asked_nothing_starts_again_and_nobody_is_taken_in(what):
    run = Run(nodes=3, fewest=1)
    run.form(0, 1)
    run.stopping = True
    assert kinds(run.membership.hello(Hello(2, "node2", "10.0.1.12", 4, FACTS), 5.0)) == [(2, "Refused")]
    if what == "a failed rank":
        outgoing = run.fault(1, "rank 4 was killed", now=6.0)
    else:
        outgoing = run.membership.lost(1, "the cable is out", 6.0)
    assert run.membership.ended
    assert run.restarts == []
    end = dict(outgoing)[0]
    assert isinstance(end, End)
    assert end.failure.exit_code == 75


def test_a_bug_that_shows_while_the_run_stops_is_told_as_one():
    run = Run()
    run.form(0, 1)
    run.stopping = True
    end = dict(run.fault(1, "rank 4 failed: ValueError", now=6.0, may_pass=False))[0]
    assert (end.failure.message, end.failure.exit_code) == ("rank 4 failed: ValueError", 1)


def wrong(rank):
    return Failure(f"rank {rank} computes wrongly", rank, f"node{rank // 4}", "", 3, excludes=True)


def test_a_node_that_computes_wrongly_is_left_out_and_not_taken_back_in():
    run = Run(nodes=3, fewest=2)
    run.form(0, 1, 2)
    outgoing = run.membership.heard(2, Failed(1, wrong(6)), 10.0)  # whoever says it, rank 6 is node 1's
    assert kinds(outgoing) == [(1, "End"), (0, "Again"), (2, "Again")]
    assert outgoing[0][1].failure.exit_code == 3
    assert [restart.rank for restart in run.restarts] == [6]
    ((_, refused),) = run.membership.hello(Hello(1, "node1", "10.0.1.11", 4, FACTS), 11.0)
    assert "excluded" in refused.why
    assert kinds(run.membership.heard(2, Failed(1, wrong(6)), 10.0)) == []  # old news
    teams = [letter for node in (0, 2) for letter in run.membership.heard(node, Ready(), 12.0)]
    assert [team.ranks for _, team in teams if isinstance(team, Team)] == [8]


@pytest.mark.parametrize(("fewest", "rank", "restarts"), [(3, 6, 3), (2, 1, 3), (2, 6, 0)])
def test_where_a_node_cannot_be_left_out_the_run_ends_with_what_it_computed(fewest, rank, restarts):
    """Too few would be left; it is the leader's; nothing is to be started again."""
    run = Run(nodes=3, fewest=fewest, max_restarts=restarts)
    run.form(0, 1, 2)
    outgoing = run.membership.heard(2, Failed(1, wrong(rank)), 10.0)
    assert kinds(outgoing) == [(0, "End"), (1, "End"), (2, "End")]
    assert {end.failure.exit_code for _, end in outgoing} == {3}
