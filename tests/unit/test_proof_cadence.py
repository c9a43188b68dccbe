"""How often replicas are compared, from what comparing costs."""

import random

import pytest

from dure.proof.proof_cadence import MOST_STEPS, SHARE, ProofCadence, ProofCost, steps_between


def run(hashing, exchange, step, steps, ranks=3, every="auto", start=0, noise=0.0):
    """The steps after which ranks prove that measure these costs (seconds of hashing may differ by rank)."""
    dice = random.Random(2)
    cadences = [ProofCadence(every, start) for _ in range(ranks)]
    proved = []
    for steps_done in range(start + 1, start + steps + 1):
        for one in cadences:
            one.step_took(step * (1 + noise * dice.random()))
        due = {one.is_due(steps_done) for one in cadences}
        assert len(due) == 1  # all ranks, or none
        if due.pop():
            proved.append(steps_done)
            told = [
                ProofCost.from_text(one.cost(hashing * (1 + noise * dice.random()), steps_done).as_text())
                for one in cadences
            ]
            for one in cadences:
                one.proved(told, exchange * (1 + noise * dice.random()), steps_done)
    return proved


@pytest.mark.parametrize("noise", [0.0, 3.0])
@pytest.mark.parametrize(
    ("hashing", "exchange", "step"),
    [(0.01, 0.001, 0.2), (1e-4, 5e-4, 2e-3), (0.2, 0.01, 5.0), (1e-6, 1e-5, 1.0)],
)
def test_proofs_cost_half_a_percent_of_the_time_and_ranks_agree_on_them(hashing, exchange, step, noise):
    proved = run(hashing, exchange, step, 20_000, noise=noise)
    assert proved[0] == 1
    late = [at for at in proved if at > 5_000]
    assert len(late) > 10
    # Noise makes steps longer, on average by its half; costs are the smallest that were seen.
    share = (hashing + exchange) / (step * (1 + noise / 2)) * (len(late) / 15_000)
    assert share <= SHARE * 1.1
    assert share > SHARE / (1 + noise) / 2 or len(late) == 15_000  # and not far rarer than they may


def test_they_are_never_rarer_than_the_bound():
    proved = run(hashing=10.0, exchange=1.0, step=1e-3, steps=5_000)
    assert proved == [1, *range(1 + MOST_STEPS, 5_001, MOST_STEPS)]


def test_the_slowest_hash_counts_and_the_shortest_exchange():
    told = [ProofCost(0.01, 0.5, 0.1), ProofCost(0.04, 0.01, 0.1)]
    assert steps_between(told) == 100
    assert steps_between([ProofCost(0.01, 0.0, 0.0)]) == 1


def test_a_fixed_number_and_none_are_what_they_were():
    assert run(1.0, 1.0, 1e-3, 50, every=20) == [20, 40]
    assert run(1.0, 1.0, 1e-3, 50, every=0) == []
    assert run(1.0, 1.0, 1e-3, 50, every=20, start=15) == [20, 40, 60]


def test_a_session_that_goes_on_proves_after_its_first_step():
    assert run(0.01, 0.001, 0.2, 30, start=400)[0] == 401
