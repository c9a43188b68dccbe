"""What a job may bring of its own: optimizers, schedules, metrics that are no means, an early end, hooks."""

import math

import pytest
from support import own_job

from dure.base.run_folder import RunFolder
from dure.launch import run_team

NAMES = tuple(own_job.JOBS)
"""The last one fails."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return own_job.train_each(NAMES[:-1], tmp_path_factory.mktemp("own-1"), 1)


@pytest.fixture(scope="module")
def on_three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own-3")
    return run_team(
        "support.own_job:train_each",
        (NAMES, str(folder), 3),
        ranks=3,
        folder=RunFolder(folder / "run"),
        hang_seconds=300,
    )


def _told(result):
    """When a checkpoint can be begun is a matter of time: the one before must be written."""
    hooks = result["hooks"]
    return {**result, "hooks": hooks and [one for one in hooks if one[0] != "on_save"]}


@pytest.mark.parametrize("name", NAMES[:-1])
def test_the_same_bits_and_metrics_on_1_and_3_ranks(alone, on_three, name):
    assert [_told(result[name]) for result in on_three] == [_told(alone[name])] * 3


@pytest.mark.parametrize("name", ["warm-up", "own optimizer and schedule", "stopping"])
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(alone, tmp_path, name):
    """The schedule, and how long the metric was not better, are part of the state."""
    steps = {"warm-up": 6, "own optimizer and schedule": 6}.get(name, 5)
    own_job.train_one(name, tmp_path, 1, {"train.steps": str(steps)})
    whole = own_job.train_one(name, tmp_path, 1)
    assert whole["notes"][0].startswith("goes on from step")
    assert (whole["sha"], whole["metrics"]) == (alone[name]["sha"], alone[name]["metrics"])
    if name == "stopping":  # and a run that ended early is over
        again = own_job.train_one(name, tmp_path, 1)
        assert (again["sha"], again["steps"]) == (whole["sha"], whole["steps"])


def test_a_run_ends_early_when_its_metric_gets_no_better(alone):
    found = alone["stopping"]
    assert found["steps"] < 9
    assert found["steps"] % 2 == 0
    assert "loss was not better than" in found["notes"][0]


def test_metrics_of_all_samples_are_right(alone):
    found = alone["gathered"]["metrics"]
    table = [[found[f"confusion.{row}.{column}"] for column in range(2)] for row in range(2)]
    assert sum(map(sum, table)) == 21 == found["spread.rows"]
    assert found["accuracy"] == (table[0][0] + table[1][1]) / 21
    hits = 2 * table[1][1]
    assert found["f1"] == pytest.approx(hits / (hits + table[0][1] + table[1][0]))
    assert 0 <= found["auroc"] <= 1
    assert not math.isnan(found["spread.std"])


def test_hooks_are_called_in_step_on_all_ranks(alone):
    told = [(name, steps) for name, steps, _ in alone["hooked"]["hooks"]]
    assert told[0] == ("on_start", 0)
    assert [steps for name, steps in told if name == "on_step"] == list(range(1, 10))
    assert [steps for name, steps in told if name == "on_eval"] == [4, 8, 9]
    saved = [steps for name, steps in told if name == "on_save"]
    assert saved[0] == 4
    # Every fourth step, or later, or not at all: one is begun only when the one before is written.
    assert set(saved[1:]) <= {8, 9}
    assert told[-1] == ("on_end", 9)


def test_what_a_hook_raises_on_one_rank_is_raised_on_all(on_three):
    assert [result["failing hook"] for result in on_three] == [
        "rank 2: ValueError: the last rank has had enough"
    ] * 3
