"""A script without a job file saves, stops when asked and goes on with the same bits."""

import math
import signal

import pytest
import torch
from support.checkpoints import ALONE

from dure.base.errors import CheckpointError, Resumable, UsageError
from dure.base.run_folder import RunFolder
from dure.checkpoint.manager import CheckpointManager
from dure.checkpoint.places import Places
from dure.checkpoint.run_parts import Ranks, Replica, Reporting, RunInfo
from dure.comm.topology import read_topology
from dure.config import Checkpoint
from dure.observe import events
from dure.observe.heartbeat import Heartbeat

STEPS = 6


@pytest.fixture(autouse=True)
def _signals():
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Counter:
    """The least that a script has to tell of its progress."""

    def __init__(self):
        self.steps_done = 0
        self.metrics = {}
        self.evaluated = False

    def to_facts(self):
        return {"loss": math.nan}

    def go_on_from(self, facts):
        self.steps_done = int(facts["step"])


class Script:
    """A plain loop around a manager, in a world of one rank."""

    def __init__(self, folder, *, recipe=None, sync=True, **settings):
        torch.manual_seed(0)
        self.module = torch.nn.Linear(5, 3)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.1)
        self.progress, self.notes = Counter(), []
        run = RunFolder(folder)
        chosen = Checkpoint(**{"every_steps": 2, "every_seconds": 0, **settings})
        self.checkpoints = CheckpointManager(
            chosen,
            Places.of(chosen, run, storage=folder, base=folder),
            Ranks(read_topology({}), ALONE, torch.device("cpu"), sync),
            Replica(self.module, self.optimizer, None, lambda: None, lambda step: None),
            self.progress,
            RunInfo(STEPS, 3, recipe or {"seed": 0}, {"script": "test"}),
            Reporting(events.Recorder(None), Heartbeat(None), self.notes.append),
        )
        self.checkpoints.resume()

    def step(self):
        flags = self.checkpoints.step_flags()
        with self.checkpoints.updating():
            for parameter in self.module.parameters():
                parameter.grad = torch.full_like(parameter, self.progress.steps_done + 1.0)
            self.optimizer.step()
        self.progress.steps_done += 1
        self.checkpoints.save_if_due(flags)

    def train(self):
        while self.progress.steps_done < STEPS:
            self.step()
        self.checkpoints.save_last()
        return [parameter.detach().clone() for parameter in self.module.parameters()]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_a_script_that_was_stopped_goes_on_to_the_same_bits(tmp_path):
    whole = Script(tmp_path / "whole").train()
    stopped = Script(tmp_path / "stopped")
    stopped.step()
    (tmp_path / "stopped" / "stop").touch()
    with pytest.raises(Resumable, match=f"stopped after step 2 of {STEPS}.* goes on from there"):
        stopped.step()
    (tmp_path / "stopped" / "stop").unlink()
    resumed = Script(tmp_path / "stopped")
    assert resumed.progress.steps_done == 2
    assert resumed.notes == [f"goes on from step 2 of {STEPS}"]
    assert same(resumed.train(), whole)


def test_a_signal_stops_it_at_the_next_step_with_its_state_saved(tmp_path):
    script = Script(tmp_path, every_steps=100)
    script.step()
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(Resumable, match="stopped after step 2"):
        script.step()
    assert Script(tmp_path).progress.steps_done == 2


def test_a_state_of_another_recipe_is_refused_by_name(tmp_path):
    Script(tmp_path).train()
    with pytest.raises(UsageError, match="seed was 0 and is 1"):
        Script(tmp_path, recipe={"seed": 1})


def test_an_update_that_fails_right_after_a_resume_is_the_states_fault(tmp_path):
    Script(tmp_path).train()
    resumed = Script(tmp_path)
    with (
        pytest.raises(CheckpointError, match=f"cannot go on from the state of step {STEPS}"),
        resumed.checkpoints.updating(),
    ):
        raise RuntimeError("exp_avg has another shape")


def test_where_ranks_train_apart_nothing_is_saved(tmp_path):
    Script(tmp_path, sync=False).train()
    assert not (tmp_path / "checkpoints").exists()
