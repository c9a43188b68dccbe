"""A run's receipt: one chain whatever happens to the run, and no bit of what it vouches for can be changed."""

import random
import shutil
import subprocess
from pathlib import Path

import pytest
from support import FOLDER
from support.alone import train_alone
from support.commands import dure, train

from dure.base.errors import ReceiptWrong
from dure.proof.receipt import RECORD
from dure.proof.verify_receipt import verify

JOB = """
name = "interrupted"
[model]
factory = "{here}/interrupted.py:model"
args = {{ plan = "{plan}" }}
[data]
factory = "{here}/drifting.py:data"
global_batch = 40
[train]
steps = 60
seed = 3
receipt_every = 7
[team]
max_restarts = 3
[checkpoint]
every_steps = 3
"""
PLAN = ("1-kill-1", "2-kill-0", "3-stop", "4-kill-1", "5-stop", "6-kill-0", "7-kill-3")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(an undisturbed run on one rank, one of 5 kills, 2 stops and 3 numbers of ranks)"""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "plan").mkdir()
    job = folder / "job.toml"
    job.write_text(JOB.format(here=FOLDER, plan=folder / "plan"))
    train_alone(job, folder / "whole")
    for name in PLAN:
        (folder / "plan" / name).touch()
    codes = [train(job, folder / "run", "--ranks", ranks).code for ranks in (3, 2, 4)]
    assert codes == [75, 75, 0]
    assert sorted(path.name for path in (folder / "plan").iterdir()) == [f"done-{name}" for name in PLAN]
    return folder / "whole", folder / "run"


def test_five_kills_and_changing_ranks_give_the_chain_of_one_undisturbed_run(runs):
    whole, run = runs
    for name in ("head", "steps"):
        assert (run / "receipt" / name).read_bytes() == (whole / "receipt" / name).read_bytes()
    found = verify(run)
    assert (found.steps, found.gaps, found.notes) == (60, [], [])
    assert found.sessions == 8
    assert len(found.checkpoints) == 2
    assert found.weights == verify(whole).weights
    assert (run / "receipt" / "steps").stat().st_size / 60 < 200
    assert RECORD < 200


def flips(run, weights, count, seed):
    """Random bits of the receipt, of checkpoints and of a file of weights, each flipped for a look."""
    kept = [
        run / "receipt" / name
        for name in ("head", "steps", "checkpoints", "sessions", "samples", "signature")
    ]
    parts = sorted((run / "checkpoints").glob("step-*/*"))
    chosen = random.Random(seed)
    for at in range(count):
        path = (kept, parts, [weights])[at % 3][chosen.randrange((len(kept), len(parts), 1)[at % 3])]
        whole = path.read_bytes()
        changed = bytearray(whole)
        bit = chosen.randrange(8 * len(whole))
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        yield f"{path.name} bit {bit}"
        path.write_bytes(whole)


@pytest.fixture(scope="module")
def signed(runs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("signed")
    key, public, weights = folder / "key.pem", folder / "public.pem", folder / "model.safetensors"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True)
    subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", public], check=True)
    shutil.copytree(runs[1], folder / "run")
    assert dure("export", folder / "run", weights).code == 0
    ended = dure("receipt", folder / "run", "--sign", key, "--in-toto", folder / "statement.json")
    assert ended.code == 0, ended.err
    return folder / "run", weights, public


@pytest.mark.parametrize("count", [600, pytest.param(10_000, marks=pytest.mark.soak)])
def test_any_flipped_bit_of_receipt_checkpoints_and_weights_is_found(signed, count):
    run, weights, public = signed
    assert verify(run, weights=weights, key=public).weights_file == str(weights)
    missed = []
    for what in flips(run, weights, count, seed=count):
        try:
            verify(run, weights=weights, key=public)
            missed.append(what)
        except ReceiptWrong:
            pass
    assert missed == []
    verify(run, weights=weights, key=public)


def test_the_command_verifies_names_what_is_wrong_and_exports(signed, tmp_path):
    run, weights, public = signed
    good = dure("verify", run, "--weights", weights, "--key", public)
    assert good.code == 0, good.err
    assert good.out.endswith("verified\n")
    shutil.copytree(run / "receipt", tmp_path / "mailed")  # a stranger has the receipt alone
    assert dure("verify", tmp_path / "mailed", "--weights", weights).code == 0
    other = tmp_path / "other.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    other.write_bytes(changed)
    bad = dure("verify", tmp_path / "mailed", "--weights", other)
    assert bad.code == 3
    assert "is not what it was after step 59" in bad.err
    statement = (run.parent / "statement.json").read_text()
    assert "https://in-toto.io/Statement/v1" in statement
    assert verify(run).chain in statement
    assert dure("verify", tmp_path).code == 2


def test_a_checkpoint_that_was_put_there_is_found(signed, tmp_path):
    run, _, _ = signed
    shutil.copytree(run, tmp_path / "run")
    checkpoints = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    name = checkpoints[0].name
    shutil.rmtree(checkpoints[0])
    shutil.copytree(
        checkpoints[1], Path(checkpoints[0].parent / name)
    )  # another step under its name: still true
    assert len(verify(tmp_path / "run").checkpoints) == 2
    (tmp_path / "run" / "receipt" / "checkpoints").write_bytes(b"")
    with pytest.raises(ReceiptWrong, match="has no root for"):
        verify(tmp_path / "run")
