"""How large DDP's buckets are."""

import pytest

from dure.step.replica import bucket_mib


@pytest.mark.parametrize(
    ("mib", "free_cores", "expected"),
    [(400, 4, 25), (80, 4, 10), (3, 4, 1), (0, 4, 1), (400, 0, 25), (3, -2, 25)],
)
def test_buckets_are_small_only_where_the_exchange_can_hide(mib, free_cores, expected):
    assert bucket_mib(mib * 2**20, free_cores) == expected
