"""What a kill costs is counted from the kill, in steps that were done after it."""

import pytest

from dure.base.errors import DureError
from dure.tools.bench.recover import Loss, _loss


def test_the_clock_runs_to_the_next_step_and_to_the_one_under_way():
    done = [(80, 8.0), (81, 8.5), (79, 10.0), (80, 11.0), (81, 12.0), (82, 13.0)]
    assert _loss(done, step=82, at=9.0) == Loss(next_step=1.0, caught_up=4.0, repeated=3)


def test_a_run_that_lost_nothing_repeats_nothing():
    assert _loss([(82, 10.0)], step=82, at=9.0) == Loss(next_step=1.0, caught_up=1.0, repeated=0)


def test_a_run_that_never_went_on_is_no_figure():
    with pytest.raises(DureError, match="did not go on"):
        _loss([(80, 8.0)], step=82, at=9.0)
