"""train.ema: the moving average that torch's own average of the saved weights is, on any ranks and over a resume."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from support.commands import EXAMPLES, dure, train

from dure.base.run_folder import RunFolder
from dure.checkpoint.export import export_weights

DECAY = 0.7
STEPS = 5


def job_in(folder, steps, ranks):
    """The example with BatchNorm, each step of it saved."""
    folder.mkdir(exist_ok=True)
    shutil.copy(EXAMPLES / "cnn_batchnorm.py", folder)
    text = (EXAMPLES / "cnn_batchnorm.toml").read_text()
    lines = [line for line in text.splitlines() if not line.startswith(("epochs", "steps", "ranks"))]
    at = lines.index("[train]")
    lines[at : at + 1] = ["[train]", f"steps = {steps}", f"ema = {DECAY}"]
    at = lines.index("[team]")
    lines[at : at + 1] = ["[team]", f"ranks = {ranks}"]
    lines.insert(lines.index("[eval]") + 1, "every_steps = 1")
    # After each step an evaluation, and after each evaluation a checkpoint, even while another one is being written.
    lines += ["[checkpoint]", "every_steps = 1", "keep = 10", 'keep_best = "loss"']
    path = folder / "job.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def exported(run, step, *, average=False):
    path = run.parent / "out.safetensors"
    export_weights(RunFolder(run), path, step, average=average)
    return load_file(path)


def test_the_average_is_torchs_own_of_the_steps_weights_on_1_rank_and_on_2_with_a_resume(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    one = train(job_in(tmp_path / "job", STEPS, 1), whole).summary
    assert train(job_in(tmp_path / "job", 2, 2), parts).summary["steps"] == 2
    two = train(job_in(tmp_path / "job", STEPS, 2), parts).summary
    assert one["weights_sha256"] == two["weights_sha256"]
    average = exported(whole, STEPS, average=True)
    ended = dure("export", parts, tmp_path / "again.safetensors", "--step", STEPS, "--average")
    assert ended.code == 0, ended.err
    again = load_file(tmp_path / "again.safetensors")
    assert {name: tensor.shape for name, tensor in average.items()} == {
        name: tensor.shape for name, tensor in exported(whole, STEPS).items()
    }
    steps = [exported(whole, step) for step in range(1, STEPS + 1)]
    expected = steps[0]
    for weights in steps[1:]:
        for name, tensor in weights.items():
            is_trained = tensor.is_floating_point() and "running" not in name
            expected[name] = torch.lerp(expected[name], tensor, 1 - DECAY) if is_trained else tensor
    for name, tensor in expected.items():
        assert torch.equal(average[name], tensor), name
        assert torch.equal(again[name], tensor), name
    assert any(not torch.equal(tensor, steps[-1][name]) for name, tensor in average.items())
    assert one["metrics"] == two["metrics"]


def test_a_run_without_an_average_says_so(tmp_path):
    run = tmp_path / "run"
    job = job_in(tmp_path / "job", 1, 1)
    job.write_text(job.read_text().replace(f"ema = {DECAY}\n", ""))
    assert train(job, run).code == 0
    ended = dure("export", run, tmp_path / "out.safetensors", "--average")
    assert ended.code == 2
    assert "it was not trained with train.ema" in ended.err


@pytest.mark.parametrize("decay", ["0", "1", "-0.5"])
def test_a_decay_that_is_none_is_refused(decay, tmp_path):
    job = job_in(tmp_path / "job", 1, 1)
    job.write_text(job.read_text().replace(f"ema = {DECAY}", f"ema = {decay}"))
    ended = train(job, tmp_path / "run")
    assert ended.code == 2
    assert "train.ema" in ended.err
