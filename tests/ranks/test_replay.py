"""A run on many ranks is had again on one, and where it was disturbed the replay says so by step and shard."""

import json
import math
import re
import shutil

import pytest
from support import FOLDER
from support.commands import dure, train

JOB = """
name = "replayed"
[model]
factory = "{here}/flipped.py:model"
args = {{ folder = "{folder}", step = 13 }}
[data]
factory = "{here}/drifting.py:data"
global_batch = 40
[train]
steps = 24
seed = 3
receipt_every = 10
[checkpoint]
every_steps = 5
keep = 20
"""


@pytest.fixture(scope="module", params=[4, pytest.param(8, marks=pytest.mark.soak)])
def runs(request, tmp_path_factory):
    """(a good run, one of the same recipe in which a bit was lost on all ranks before step 13)"""
    folder = tmp_path_factory.mktemp("runs")
    job = folder / "job.toml"
    job.write_text(JOB.format(here=FOLDER, folder=folder))
    good = train(job, folder / "good", "--ranks", request.param).summary
    (folder / "flip").touch()
    bad = train(job, folder / "bad", "--ranks", 2).summary
    (folder / "flip").unlink()
    assert good["recipe"] == bad["recipe"]
    assert good["weights_sha256"] != bad["weights_sha256"]
    return folder / "good", folder / "bad"


def test_a_run_on_many_ranks_is_the_same_on_1(runs):
    ended = dure("replay", runs[0], "--steps", "12:22", "--json")
    assert ended.code == 0, ended.err
    (one,) = json.loads(ended.out)["replays"]
    assert one["start"] in (0, 5, 10)  # a busy machine leaves checkpoints out
    assert (one["end"], one["difference"]) == (22, "")


def test_a_lost_bit_is_found_by_step_and_shard_with_one_replay(runs):
    ended = dure("replay", runs[1], "--json")
    assert ended.code == 3, ended.err
    (one,) = json.loads(ended.out)["replays"]
    found = r"step 13, computed again, gives (another loss|other gradients) in shard 0 than the receipt"
    assert re.search(found, one["difference"])


def test_two_runs_part_where_the_bit_was_lost(runs):
    good, bad = runs
    ended = dure("diff", good, bad, "--json")
    assert ended.code == 3, ended.err
    found = json.loads(ended.out)
    assert (found["step"], found["recipe"]) == (13, [])
    assert found["what"] in ("another loss in shard 0", "other gradients in shard 0")
    assert "model/layers.2.weight" in found["tensors"]
    # Both have one recipe: a replay tells which of them is wrong, and confirms the step and the shard.
    assert re.search(
        r"^run 2 .*: step 13, computed again, gives (another loss|other gradients) in shard 0", found["wrong"]
    )
    assert found["replays"] <= 2 < 2 * math.log2(24)
    told = json.loads(dure("diff", good, bad, "--no-replay", "--json").out)
    assert (told["step"], told["replays"], told["wrong"]) == (13, 0, "")
    same = dure("diff", good, good)
    assert (same.code, same.out) == (0, "the same\n")


@pytest.mark.soak
def test_a_lost_bit_that_no_record_sees_is_found_by_tensor_and_the_wrong_run_named(runs, tmp_path):
    """Memory that lost a bit cannot be had again: the first state that was kept after it tells the tensor."""
    folder = runs[0].parent
    (folder / "flip-spare").touch()
    bad = train(folder / "job.toml", tmp_path / "bad", "--ranks", 2)
    (folder / "flip-spare").unlink()
    assert bad.code == 0, bad.err
    found = json.loads(dure("diff", runs[0], tmp_path / "bad", "--json").out)
    assert found["tensors"] == ["model/spare"]
    assert found["same_until"] <= 13 <= found["step"] < found["tensors_after"] <= 20
    assert found["wrong"].startswith("run 2 ")
    assert found["replays"] <= 2 * math.log2(24)


@pytest.mark.soak
def test_a_difference_that_no_record_sees_is_found_by_step_and_tensor_with_few_replays(runs, tmp_path):
    """Another job, whose code changes one bit of one weight at step 13, each time."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "flip-spare").touch()
    job = tmp_path / "job.toml"
    job.write_text(
        JOB.format(here=FOLDER, folder=tmp_path / "other").replace("every_steps = 5", "every_steps = 100")
    )
    assert train(job, tmp_path / "run", "--ranks", 2).code == 0
    ended = dure("diff", runs[0], tmp_path / "run", "--json")
    assert ended.code == 3, ended.err
    found = json.loads(ended.out)
    assert (found["step"], found["same_until"], found["tensors"]) == (13, 13, ["model/spare"])
    assert found["what"] == "the state after it"
    assert any("model.args.folder" in line for line in found["recipe"])
    assert 0 < found["replays"] <= 2 * math.log2(24)


def test_a_machine_that_computes_other_bits_says_so_before_it_starts(runs):
    ended = dure("replay", runs[0], "--spot", 3, MKL_CBWR="COMPATIBLE")
    assert ended.code == 2, ended.err
    assert "this machine computes other bits" in ended.err
    assert "matmul" in ended.err


def test_what_cannot_be_replayed_is_refused_in_words(runs, tmp_path):
    for steps, words in (("20:900", "has steps 0 to 23"), ("7", "write A:B"), ("9:9", "has steps")):
        ended = dure("replay", runs[0], "--steps", steps)
        assert ended.code == 2, ended.err
        assert words in ended.err
    shutil.copytree(runs[0], tmp_path / "run")
    steps = tmp_path / "run" / "receipt" / "steps"
    changed = bytearray(steps.read_bytes())
    changed[500] ^= 1
    steps.write_bytes(changed)
    ended = dure("replay", tmp_path / "run")
    assert ended.code == 3
    assert "nothing to compare with" in ended.err
