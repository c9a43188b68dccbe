"""All ranks decide alike when to save: from the step, and from step flags that all of them know."""

import pytest
from support.checkpoints import ALONE

from dure.base.run_folder import RunFolder
from dure.checkpoint.storage_tier import BUSY, DUE, STOP, StorageTier
from dure.config import Checkpoint
from dure.engine.new_run import new_run
from dure.observe import events
from dure.storage import open_store


@pytest.fixture
def storage_tier(tmp_path):
    def make(**settings):
        store = open_store(tmp_path)
        recorder = events.Recorder(None)
        return StorageTier(store, Checkpoint(**settings), ALONE, ALONE, recorder, tmp_path / "stop")

    return make


def test_a_checkpoint_is_due_by_steps_by_time_and_after_an_evaluation_for_the_best(storage_tier):
    by_steps = storage_tier(every_steps=3, every_seconds=0)
    assert [step for step in range(1, 8) if by_steps.due(0, step, evaluated=True)] == [3, 4, 5, 6, 7]
    by_time = storage_tier()
    assert not by_time.due(0, 3, evaluated=True)
    assert by_time.due(DUE, 3, evaluated=False)
    assert storage_tier(keep_best="loss").due(0, 5, evaluated=True)


def test_one_that_is_due_while_another_is_written_waits_for_it(storage_tier):
    waiting = storage_tier(every_steps=3)
    assert not waiting.due(BUSY, 3, evaluated=False)
    assert not waiting.due(BUSY, 4, evaluated=False)
    assert waiting.due(0, 5, evaluated=False)


def test_whoever_is_asked_to_stop_saves_even_when_nothing_is_due(storage_tier, tmp_path):
    asked = storage_tier(every_steps=100)
    assert asked.step_flags() == 0
    (tmp_path / "stop").touch()
    assert asked.step_flags() == STOP
    assert asked.due(STOP | BUSY, 7, evaluated=False)
    signalled = storage_tier(every_steps=100)
    (tmp_path / "stop").unlink()
    signalled.ask_to_stop()
    assert signalled.step_flags() == STOP


def test_a_fresh_start_moves_the_earlier_run_aside_and_deletes_nothing(tmp_path, capsys):
    for number in (1, 2):
        folder = RunFolder(tmp_path / "run")
        folder.create()
        folder.job.write_text(f"run {number}")
        with new_run(tmp_path / "run", "job", goes_on=True, fresh=True) as made:
            assert not made.job.exists()
        assert (tmp_path / f"run.{number}" / "job.json").read_text() == f"run {number}"
        assert f"run.{number}" in capsys.readouterr().err
