"""A script of somebody's own saves and goes on, on another number of ranks, with the bits of a run that nothing
happened to."""

import json
import shutil
import signal

import pytest
from safetensors.torch import load_file
from support.commands import dure
from support.script_runs import SAVING, ScriptRun, alone

from dure.base.run_folder import RunFolder
from dure.checkpoint.export import as_rows, export_weights
from dure.proof.verify_receipt import verify


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What one rank comes to, and where it has saved it."""
    path = tmp_path_factory.mktemp("alone")
    code, said, found = alone(path / "out.json", "--folder", path / "saved")
    assert code == 0, said
    assert found["steps"] == 24
    return found, path / "saved"


def test_2_then_3_then_1_ranks_come_to_the_same_bits(undisturbed, tmp_path):
    run = ScriptRun(tmp_path / "run")
    try:
        run.start(2, "--stop-at", 6, "--by", "SIGUSR1")  # one rank alone is told, as Slurm may
        code, said, found = run.end()
        assert (code, found) == (75, None), said
        assert (
            said.count(f"stopped after step 7, resumable: the same command with --run-dir {run.folder.path}")
            == 1
        )
        run.start(3, "--nap", "0.3")
        run.wait_for_step(3, 9)
        run.process.send_signal(signal.SIGINT)  # to the launcher, as Ctrl-C does
        code, said, found = run.end()
        assert (code, found) == (75, None), said
        assert "began at 7 on 3" in said
        assert "Ctrl-C: stops after this step and saves" in said
        run.start(1)
        code, said, found = run.end()
        assert code == 0, said
        assert "began at 7 on" not in said
        assert found == undisturbed[0]
        assert run.restarts() == []
        run.start(1, "--steps", 2, own=["--fresh"])
        code, said, found = run.end()
        assert (code, "began at 0" in said) == (0, True), said
    finally:
        run.clear()
    run = RunFolder(tmp_path / "run.1")  # where --fresh has put it
    listed = as_rows(run, verify=True)
    # One that is due while the one before is still being written waits for the next turn.
    assert [row["step"] for row in listed] in ([24, 20], [24, 15])
    assert all(row["verified"] for row in listed)
    assert export_weights(run, tmp_path / "weights.safetensors")["step"] == 24
    # Three sessions on three numbers of ranks leave the receipt of one on one rank.
    for name in ("head", "steps"):
        own, theirs = (place / "receipt" / name for place in (run.path, undisturbed[1]))
        assert own.read_bytes() == theirs.read_bytes()
    for place in (run.path, undisturbed[1]):
        checked = verify(place)
        assert (checked.steps, checked.gaps) == (24, [])
        assert len(checked.checkpoints) == 2
    weights = load_file(tmp_path / "weights.safetensors")
    assert {name.split(".")[0] for name in weights} == {"net", "critic"}


def test_the_best_evaluated_state_stays_beside_the_newest(tmp_path):
    judged = json.dumps({3: 0.9, 6: 0.1, 9: 0.5, 10: 0.3})
    options = ("--folder", tmp_path / "saved", "--every", 100, "--steps", 12, "--judged", judged)
    code, said, _ = alone(tmp_path / "out.json", *options)
    assert code == 0, said
    listed = as_rows(RunFolder(tmp_path / "saved"), verify=True)
    assert [row["step"] for row in listed] == [12, 10, 6]
    assert [row["metrics"] for row in listed] == [
        {},
        {"loss": 0.3, "accuracy": -0.3},
        {"loss": 0.1, "accuracy": -0.1},
    ]


def test_by_hand_it_needs_a_folder_and_ends_with_75_too(tmp_path):
    code, said, _ = alone(tmp_path / "out.json")
    assert code == 1
    assert "give folder=..., a folder or s3://bucket/prefix, or start the script with `dure run`" in said
    code, said, found = alone(
        tmp_path / "out.json", "--folder", tmp_path / "saved", "--stop-at", 10, "--by", "SIGINT"
    )
    assert (code, found) == (75, None), said
    assert said.count("stopped after step 11, resumable: the same command goes on from there") == 1
    (row,) = as_rows(RunFolder(tmp_path / "saved"), verify=True)[:1]
    assert (row["step"], row["verified"]) == (11, True)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (["--batch", 24], "global_batch was 16 and is 24"),
        (["saving.py"], "saving.py is changed"),
    ],
)
def test_a_state_of_another_recipe_is_refused_by_name(undisturbed, tmp_path, monkeypatch, changed, words):
    saved = shutil.copytree(undisturbed[1], tmp_path / "saved")
    arguments = changed
    if changed == ["saving.py"]:
        other = tmp_path / "saving.py"
        other.write_text(SAVING.read_text().replace("Dropout(0.2)", "Dropout(0.3)"))
        monkeypatch.setattr("support.script_runs.SAVING", other)
        arguments = []
    steps = ["--steps", 27, "--folder", saved]
    code, said, found = alone(tmp_path / "out.json", *steps, *arguments)
    assert (code, found) == (1, None)
    assert words in said, said
    assert "in another folder (nothing is deleted)" in said
    if not arguments:
        code, said, found = alone(tmp_path / "out.json", *steps, "--any-recipe")
        assert code == 0, said
        assert (found["steps"], "began at 24" in said) == (27, True)


def test_a_script_s_receipt_is_shown_and_verified_and_a_replay_is_refused_in_words(undisturbed, tmp_path):
    folder = undisturbed[1]
    shown = json.loads(dure("receipt", folder, "--json").out)
    assert (shown["steps"], shown["records"]) == (24, 25)
    assert len(shown["checkpoints"]) == 2
    replayed = dure("replay", folder)
    assert replayed.code == 2
    assert "a script's run cannot be replayed" in replayed.err
    copy = shutil.copytree(folder, tmp_path / "copy")
    (state,) = list(copy.glob("step-*/*.safetensors"))[-1:]
    data = bytearray(state.read_bytes())
    data[-5] ^= 1
    state.write_bytes(data)
    assert dure("verify", copy).code == 3
