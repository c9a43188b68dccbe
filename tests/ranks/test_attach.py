"""dure.attach: stock DDP models in stock loops take dure's exchange, whatever options they have."""

import re
import subprocess
import sys

import pytest
from support import FOLDER, attaching
from support.leftovers import no_new_shared_memory, shared_memory

from dure.base.run_folder import RunFolder
from dure.launch import run_team


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = RunFolder(tmp_path_factory.mktemp("attach") / "run")
    return run_team("support.attaching:cases", (), ranks=3, folder=folder, hang_seconds=300)


@pytest.mark.parametrize("case", attaching.CASES)
def test_an_attached_model_is_the_same_bits_on_all_ranks_and_each_time_and_plain_ddp_to_rounding(case, found):
    hashes, away = found[0][case]
    assert hashes[0] == hashes[1] != hashes[2]
    assert all(rank[case][0] == hashes for rank in found)
    # bf16 gradients are added in fp32 here, and in bf16 by Gloo.
    assert away < (2e-2 if case == "mixed dtypes" else 1e-5)


def test_two_models_in_one_backward_pass_do_not_wait_for_each_other(found):
    first = found[0]["two models in one backward pass"]
    assert first[0] != first[1]
    assert [rank["two models in one backward pass"] for rank in found] == [first] * 3


def test_a_first_divergence_is_named_with_tensor_rank_and_step_on_all_ranks(found):
    for rank in found:
        told, steps = rank["a rank that wrote to its weights"]
        assert "after step 4 rank(s) 1 hold other bits of 2.weight than the other ranks" in told
        assert "last found equal after step 2" in told
        assert steps <= 5


def test_what_cannot_be_attached_is_refused_by_name(found):
    for rank in found:
        refused = rank["refused"]
        assert "is a Sequential; wrap the model first" in refused["no DDP"]
        assert "is not all ranks" in refused["a part of the ranks"]
        assert "(Embedding) has sparse gradients" in refused["sparse"]
        assert "weight is complex" in refused["complex"]
        assert "without a hook" in refused["a hook of its own"]
        assert "inside DDP's join()" in refused["join"]


@pytest.mark.parametrize("end", [pytest.param("destroy", marks=pytest.mark.soak), "leave", "raise"])
def test_a_script_that_attached_ends_as_it_would_have(end, tmp_path):
    before = shared_memory()
    command = [
        "-m",
        "dure",
        "run",
        "--ranks=3",
        f"--run-dir={tmp_path / 'run'}",
        str(FOLDER / "attaching.py"),
        end,
    ]
    ran = subprocess.run(
        [sys.executable, *command],
        cwd=FOLDER.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == (1 if end == "raise" else 0), ran.stderr
    if end == "raise":
        assert ran.stderr.splitlines()[-1].endswith("failed: ValueError: as asked")
    else:
        hashes = re.findall(r"is done (\w+)", ran.stdout)
        assert len(hashes) == 3
        assert len(set(hashes)) == 1
    no_new_shared_memory(before)
