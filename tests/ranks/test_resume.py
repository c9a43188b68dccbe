"""A run that is stopped in the middle of an epoch goes on, on any number of ranks, with the same bits."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import EXAMPLES, dure, train

JOB = """
name = "resumed"
[model]
factory = "{examples}/tiny_transformer.py:model"
args = {{ width = 32, layers = 2, heads = 4, dropout = 0.1 }}
[data]
factory = "{here}/slow_data.py:counting"
args = {{ seed = 1, sequences = 203 }}
global_batch = 64
[train]
loss = "{examples}/tiny_transformer.py:token_loss"
optimizer_args = {{ weight_decay = 0.01 }}
schedule = "LinearLR"
schedule_args = {{ start_factor = 0.1, total_iters = 20 }}
steps = 14
seed = 42
clip_norm = 1.0
prove_every = 1
"""
"""A transformer with dropout, a schedule and clipping; 4 steps are an epoch, the last one smaller."""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    path = tmp_path_factory.mktemp("job") / "job.toml"
    path.write_text(JOB.format(examples=EXAMPLES, here=Path(__file__).parent), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def whole(job, tmp_path_factory):
    """What the run comes to when nothing happens."""
    return train(job, tmp_path_factory.mktemp("whole") / "run", "--ranks", 2).summary


def bits(summary):
    return summary["weights_sha256"], summary["loss"], summary["recipe"]


def test_8_then_3_then_5_then_1_ranks_in_the_middle_of_epochs_are_the_bits_of_one_run(job, whole, tmp_path):
    folder = tmp_path / "run"
    found = None
    for ranks, steps in ((8, 3), (3, 6), (5, 9), (1, 14)):
        # A sharded optimizer is saved in parts that a team without one, or with other parts, puts together.
        sharded = ("--set", f"train.shard_optimizer={'true' if ranks in (8, 3) else 'false'}")
        found = train(job, folder, "--ranks", ranks, "--set", f"train.steps={steps}", *sharded).summary
        assert found["steps"] == steps
    assert found["resumed_from"] == 9
    assert bits(found) == bits(whole)
    assert found["ledger"]["exactly_once"] is True
    assert found["ledger"]["epochs"] == 14 // 4


def test_a_signal_finishes_the_step_saves_and_ends_resumable_and_the_same_command_goes_on(
    job, whole, tmp_path
):
    from dure.events import Stepped, read_events
    from dure.run_folder import RunFolder

    folder = RunFolder(tmp_path / "run")
    command = [sys.executable, "-m", "dure", "train", job, "--ranks", 3, "--run-dir", folder.path, "--json"]
    for number, wait_for in ((signal.SIGTERM, 2), (signal.SIGUSR1, 5)):
        running = subprocess.Popen(
            [str(word) for word in command],
            env={**os.environ, "OMP_NUM_THREADS": "1", "SLOW_SAMPLES": "0.006"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 90
        while not any(
            isinstance(event, Stepped) and event.step >= wait_for for event in read_events(folder.events(0))
        ):
            assert time.monotonic() < deadline
            assert running.poll() is None, running.stderr.read()
            time.sleep(0.02)
        running.send_signal(number)
        _, err = running.communicate(timeout=90)
        assert running.returncode == 75, err
        assert "resumable" in err
        assert not folder.stop.exists()
    found = json.loads(dure(*command[3:]).out.splitlines()[-1])
    assert bits(found) == bits(whole)
    assert found["ledger"]["exactly_once"] is True
