"""Every sample exactly once per epoch, in the documents' order, whatever divides or does not."""

from hypothesis import given
from hypothesis import strategies as st

from dure.data.shards import Split, ledger_mark, parts_of, rank_of_shard, shards_of_rank

splits = st.builds(
    Split,
    samples=st.integers(1, 300),
    global_batch=st.integers(1, 80),
    shards=st.integers(1, 16),
    kind=st.sampled_from(["interleaved", "blocks"]),
)


@given(splits)
def test_every_position_comes_exactly_once_an_epoch(split):
    seen = [
        position
        for step in range(split.steps)
        for shard in range(split.shards)
        for position in split.positions(step, shard)
    ]
    assert sorted(seen) == list(range(split.samples))


@given(splits)
def test_shards_fill_from_the_first_and_differ_by_one_sample(split):
    for step in range(split.steps):
        sizes = [len(split.positions(step, shard)) for shard in range(split.shards)]
        assert sizes == [split.count(step, shard) for shard in range(split.shards)]
        assert sizes == sorted(sizes, reverse=True)
        assert max(sizes) - min(sizes) <= 1
        assert sum(sizes) == split.batch_size(step)
        assert split.active(step) == sum(size > 0 for size in sizes)


def test_interleaved_is_the_first_documents_drawing():
    split = Split(samples=100, global_batch=20, shards=4)
    of_rank_1 = [position for step in range(split.steps) for position in split.positions(step, 1)]
    assert of_rank_1[:4] == [1, 5, 9, 13]
    assert len(of_rank_1) == 25


def test_blocks_are_the_second_documents_drawing():
    split = Split(samples=400, global_batch=40, shards=4, kind="blocks")
    for rank in range(4):
        photos = [position + 1 for step in range(split.steps) for position in split.positions(step, rank)]
        assert photos == list(range(rank * 100 + 1, rank * 100 + 101))


@given(st.integers(1, 32), st.data())
def test_ranks_share_all_shards_in_order(shards, data):
    ranks = data.draw(st.integers(1, shards))
    runs = [shards_of_rank(rank, ranks, shards) for rank in range(ranks)]
    assert [shard for run in runs for shard in run] == list(range(shards))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1
    assert all(shard in runs[rank_of_shard(shard, ranks, shards)] for shard in range(shards))


@given(st.integers(1, 50), st.integers(1, 12))
def test_micro_batches_cover_a_shard_and_none_is_empty(size, parts):
    positions = range(3, 3 + 5 * size, 5)
    found = parts_of(positions, parts)
    assert [p for part in found for p in part] == list(positions)
    assert all(found)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=50, unique=True), st.data())
def test_a_repeated_or_missing_sample_changes_the_ledgers_mark(samples, data):
    def mark(ids):
        return sum(map(ledger_mark, ids)) % 2**64

    one = data.draw(st.sampled_from(samples))
    assert mark(samples) == mark(reversed(samples))
    assert mark([*samples, one]) != mark(samples)
    assert mark([sample for sample in samples if sample != one]) != mark(samples)
