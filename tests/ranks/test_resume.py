"""A run that is stopped in the middle of an epoch goes on, on any number of ranks, with the same bits."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import FOLDER
from support.commands import EXAMPLES, dure, train
from support.leftovers import wait_until

from dure.base.run_folder import RunFolder
from dure.device.fingerprint import weights_sha256
from dure.observe.events import Stepped, read_events

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
    path.write_text(JOB.format(examples=EXAMPLES, here=FOLDER), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def whole(job, tmp_path_factory):
    """What the run comes to when nothing happens; it saves as it goes."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return train(job, folder, "--ranks", 2, "--set", "checkpoint.every_steps=5").summary


def bits(summary):
    return summary["weights_sha256"], summary["loss"], summary["recipe"]


def test_other_numbers_of_ranks_in_the_middle_of_epochs_are_the_bits_of_one_run(job, whole, tmp_path):
    """Sharded on 8, then on 3, then not sharded on 5 and on 1."""
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


def started(command, folder, steps):
    """A run that has done some steps of this session."""
    before = sum(isinstance(event, Stepped) for event in read_events(folder.events(0)))
    running = subprocess.Popen(
        [str(word) for word in command],
        env={**os.environ, "OMP_NUM_THREADS": "1", "SLOW_SAMPLES": "0.02"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 300
    while sum(isinstance(event, Stepped) for event in read_events(folder.events(0))) < before + steps:
        assert time.monotonic() < deadline
        assert running.poll() is None, running.stderr.read()
        time.sleep(0.02)
    return running


def newest_step(folder):
    """The step of the newest checkpoint that is whole."""
    manifests = (folder.path / "checkpoints").glob("step-*/manifest.json")
    return max(int(re.search(r"step-(\d+)", str(path))[1]) for path in manifests)


def test_a_run_that_is_told_to_stop_and_then_killed_goes_on_with_the_same_bits(job, whole, tmp_path):
    folder = RunFolder(tmp_path / "run")
    command = [sys.executable, "-m", "dure", "train", job, "--ranks", 3, "--run-dir", folder.path, "--json"]
    command += ["--set", "checkpoint.every_steps=2"]
    stopped = started(command, folder, 2)
    stopped.send_signal(signal.SIGTERM)
    _, err = stopped.communicate(timeout=300)
    assert stopped.returncode == 75, err
    assert "resumable" in err
    assert not folder.stop.exists()
    saved = newest_step(folder)
    killed = started(command, folder, 3)
    wait_until(lambda: newest_step(folder) > saved, "a checkpoint since the stop")
    killed.kill()
    killed.communicate(timeout=300)
    assert killed.returncode == -signal.SIGKILL
    found = json.loads(dure(*command[3:]).out.splitlines()[-1])
    assert saved < found["resumed_from"] < 14
    assert bits(found) == bits(whole)
    assert found["ledger"]["exactly_once"] is True
    assert found["ledger"]["epochs"] == 3


def test_a_finished_runs_checkpoints_are_listed_and_its_weights_open_in_plain_safetensors(whole, tmp_path):
    import torch
    from safetensors.torch import load_file
    from typer.testing import CliRunner

    from dure.cli import app

    listed = CliRunner().invoke(app, ["checkpoints", whole["run"], "--json"])
    rows = json.loads(listed.stdout)["checkpoints"]
    assert [(row["verified"], row["files"]) for row in rows] == [(True, 2), (True, 2)]
    last, before = (row["step"] for row in rows)
    assert last == 14
    assert 5 <= before < 14  # due after steps 5 and 10, and later where the one before is still being written
    out = tmp_path / "out.safetensors"
    made = json.loads(CliRunner().invoke(app, ["export", whole["run"], str(out), "--json"]).stdout)
    assert made["step"] == 14
    weights = load_file(out)
    spec = importlib.util.spec_from_file_location("tiny_transformer", EXAMPLES / "tiny_transformer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.model(width=32, layers=2, heads=4, dropout=0.1)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert unexpected == []
    assert set(missing) == set(made["ties"])
    digest = weights_sha256(model)
    assert digest == whole["weights_sha256"]
    # Every part of a checkpoint is a plain safetensors file too.
    for part in Path(whole["run"]).glob("checkpoints/step-*/part-*"):
        assert all(isinstance(tensor, torch.Tensor) for tensor in load_file(part).values())
