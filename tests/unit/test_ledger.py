"""Every sample exactly once per epoch: folded step by step, whatever the ranks and however often a run is resumed."""

import json
import time

from hypothesis import given
from hypothesis import strategies as st

from dure.comm.reduce.step_totals import StepTotals
from dure.data.ledger import Ledger, SampleLedger, mark_of, mark_of_all, verdict
from dure.data.shards import ledger_mark, sample_of_mark


def folded(epochs, batch=7, **settings):
    """The ledger of steps of `batch` samples each."""
    ledger = SampleLedger(**settings)
    for epoch in epochs:
        for start in range(0, len(epoch), batch):
            ids = epoch[start : start + batch]
            ledger.add(len(ids), mark_of(ids), ends_epoch=start + batch >= len(epoch))
    return ledger


def found(*ledgers, samples=20, together=True):
    return verdict([ledger.to_plain() for ledger in ledgers], samples, together=together)


ALL = list(range(20))


@given(st.integers(0, 2**64 - 1))
def test_a_mark_tells_its_sample(sample):
    assert sample_of_mark(ledger_mark(sample)) == sample


def test_marks_of_all_samples_are_added_in_pieces():
    assert (
        mark_of_all(3_000_001)
        == sum(mark_of(range(at, min(at + 997, 3_000_001))) for at in range(0, 3_000_001, 997)) % 2**64
    )
    assert mark_of_all(0) == 0


def test_epochs_in_any_order_are_right_and_make_one_row():
    ledger = folded([ALL, ALL[::-1], [*ALL[10:], *ALL[:10]]])
    assert found(ledger) == Ledger(3, True)
    assert len(ledger.epochs) == 1
    assert found(folded([ALL[:5]], batch=3)).exactly_once is False, "an epoch that ended too early"


def test_a_sample_that_came_twice_and_one_that_never_came_are_named():
    assert found(folded([ALL, [*ALL[:-1], 3]])) == Ledger(2, False, (3,), (19,))
    assert found(folded([[*ALL, 3]])) == Ledger(1, False, (3,), ())
    assert found(folded([ALL[1:]])) == Ledger(1, False, (), (0,))
    assert found(folded([[*ALL[:-2], 3, 4]])) == Ledger(1, False), "two of each cannot be told from their sum"


def test_an_epoch_under_way_is_not_judged_and_one_that_drops_its_last_samples_neither():
    ledger = SampleLedger()
    ledger.add(7, mark_of(ALL[:7]), ends_epoch=False)
    assert found(ledger) == Ledger(0, None)
    assert found(folded([ALL[:14]], uses_all=False)) == Ledger(0, None)


def test_a_resumed_run_goes_on_with_the_ledger_of_its_state():
    first, second = SampleLedger(), SampleLedger()
    first.add(7, mark_of(ALL[:7]), ends_epoch=False)
    state = json.loads(json.dumps(first.to_plain()))
    first.add(13, mark_of([1] * 13), ends_epoch=True)  # lost work, done again below
    second.go_on_from(state)
    second.add(13, mark_of(ALL[7:]), ends_epoch=True)
    assert found(second) == Ledger(1, True)
    older = SampleLedger()
    older.go_on_from(None)
    older.add(13, mark_of(ALL[7:]), ends_epoch=True)
    assert found(older) == Ledger(0, None)
    older.add(20, mark_of(ALL), ends_epoch=True)
    assert found(older) == Ledger(1, True)


def test_ranks_that_train_apart_are_added_up_at_the_end():
    epochs = [ALL, ALL[::-1], [*ALL[3:], *ALL[:3]]]
    ranks = [folded([epoch[rank::3] for epoch in epochs], alone=True) for rank in range(3)]
    assert found(*ranks, together=False) == Ledger(3, True)
    ranks[1].add(1, mark_of([4]), ends_epoch=True)
    ranks[0].add(20, mark_of(ALL), ends_epoch=True)
    ranks[2].add(0, 0, ends_epoch=True)
    assert found(*ranks, together=False) == Ledger(4, False, (4,), ())


def test_every_evaluation_is_judged():
    ledger = folded([ALL])
    ledger.add_evaluation(9, mark_of(range(9)), 9)
    assert found(ledger).eval_exactly_once is True
    ledger.add_evaluation(9, mark_of([*range(8), 0]), 9)
    assert found(ledger).eval_exactly_once is False


def test_the_verdict_costs_the_same_after_a_million_steps():
    ledger = SampleLedger()
    mark = mark_of(ALL)
    for _ in range(1_000_000):
        ledger.add(20, mark, ends_epoch=True)
    assert len(json.dumps(ledger.to_plain())) < 200
    began = time.process_time()
    assert found(ledger) == Ledger(1_000_000, True)
    assert time.process_time() - began < 1
    wrong = SampleLedger()
    for epoch in range(1000):
        wrong.add(20, epoch, ends_epoch=True)
    assert len(wrong.epochs) <= 64, "a run in which everything is wrong has no larger states either"
    assert found(wrong).exactly_once is False


@given(st.lists(st.lists(st.integers(0, 2**40), max_size=30), min_size=1, max_size=9))
def test_what_ranks_used_adds_up_exactly_on_its_way_with_the_losses(by_rank):
    vectors = []
    for rank, ids in enumerate(by_rank):
        totals = StepTotals.empty(4, len(by_rank))
        totals.steps[rank] = 5
        totals.samples, totals.mark = len(ids), mark_of(ids)
        vectors.append(totals.as_vector())
    assert len(vectors[0]) == StepTotals.numbers(4, len(by_rank))
    totals.take(sum(vectors))
    together = [sample for ids in by_rank for sample in ids]
    assert (totals.samples, totals.mark, set(totals.steps)) == (len(together), mark_of(together), {5})
