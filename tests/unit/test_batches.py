"""Batches are used once, and their hash is the ledger's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.base.errors import UsageError
from dure.data.batches import Batches, BatchPlan
from dure.data.ledger import mark_of
from dure.data.shards import Split, ledger_mark


@given(st.lists(st.integers(0, 2**40), max_size=300))
def test_many_marks_at_once_are_the_ledgers(ids):
    assert mark_of(ids) == sum(map(ledger_mark, ids)) % 2**64


def test_a_second_pass_is_refused_rather_than_repeated():
    data = torch.utils.data.TensorDataset(torch.arange(10.0), torch.arange(10))
    batches = Batches(data, BatchPlan(Split(10, 4, 2), 0, 1, seed=1), steps=6)
    assert [batch.epoch for batch in batches] == [0, 0, 0, 1, 1, 1]
    with pytest.raises(UsageError, match="epochs=N"):
        next(iter(batches))
