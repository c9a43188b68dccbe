"""`init_process_group("dure")`: random collectives are right, stock loops train as on Gloo, misuse is told by name."""

import json
import re
import subprocess
import sys

import pytest
import torch
from support import FOLDER
from support.leftovers import no_new_shared_memory, shared_memory

from dure.base.run_folder import RunFolder
from dure.launch import run_team


def on_ranks(entry, args, ranks, tmp_path):
    folder = RunFolder(tmp_path / f"run-{ranks}")
    return run_team(entry, args, ranks=ranks, folder=folder, hang_seconds=300, grace_seconds=0.5)


def script(*command, ranks=3, code=0, timeout=300):
    ran = subprocess.run(
        [sys.executable, "-m", "dure", "run", f"--ranks={ranks}", *command],
        cwd=FOLDER.parent,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert ran.returncode == code, ran.stderr
    return ran


def test_random_sequences_of_mixed_collectives_on_3_ranks_and_parts_of_them_are_right(tmp_path):
    before = shared_memory()
    assert on_ranks("support.backend_ranks:random_sequences", (400, 5), 3, tmp_path) == [[]] * 3
    no_new_shared_memory(before)


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ten_thousand_random_collectives(ranks, tmp_path):
    found = on_ranks("support.backend_ranks:random_sequences", (10_000, 100 + ranks), ranks, tmp_path)
    assert found == [[]] * ranks


def test_torchs_own_loops_are_the_same_bits_each_time_and_on_all_ranks_and_gloos_to_rounding(tmp_path):
    """DDP and its options, join, BatchNorm, ZeroRedundancyOptimizer, FSDP2, functional collectives, checkpoints."""
    found = on_ranks("support.backend_loops:torch_loops", (str(tmp_path / "checkpoints"),), 3, tmp_path)
    assert len(found[0]) == 11
    for name, (first, again, gloo) in found[0].items():
        assert first == again, name
        assert {rank[name][0][1] for rank in found} == {first[1]}, name
        assert first[0] == pytest.approx(gloo[0], rel=1e-4), name
        assert first[0] != [first[0][0]] * len(first[0]), name


def test_what_torch_asks_of_every_backend_is_answered_as_by_its_own(tmp_path):
    """The shapes of torch's test_c10d_common, on 4 ranks."""
    found = on_ranks("support.c10d_shapes:shapes", (), 4, tmp_path)
    counted = [[0] * 4, [1] * 4, [2] * 4, [3] * 4, [5] * 4, [5, 6, 5, 6]]  # objects are two collectives
    own = torch.arange(2.0)
    for rank, told in enumerate(found):
        assert told["numbers"] == counted
        assert told["numbers of a part"] == ([each[:3] for each in counted] if rank < 3 else None)
        assert told["outsiders"] == (
            [] if rank in (0, 2) else ["all_gather", "all_reduce", "barrier", "broadcast"]
        )
        *places, in_group, in_world = told["membership"]
        assert places == [0, 1, [1]]
        assert "not part of group" in in_group
        assert "not part of group" in in_world
        assert all("tensors with different dtypes" in words for words in told["other dtypes"])
        numbers, flags = told["complex and bool"]
        assert numbers == [complex(*(own + other).tolist()) for other in range(4)]
        assert flags == [True, False, False, True]
        assert told["made by their own ranks"] == [True] * 5
        assert max(told["checkpointed layers"].values()) < 1e-6
        assert told["checkpointed layers"] == found[0]["checkpointed layers"]
        hooks = told["own hooks"]
        assert (hooks["own"], hooks["allreduce"], hooks["fp16"]) == ([2.0] * 3, [1.5] * 3, [1.5] * 3)
        assert "must be callable" in hooks["refused"]
        assert told["names"] == ["dure"] * 3


def test_ranks_that_do_what_cannot_be_are_told_by_name_and_go_on(tmp_path):
    found = on_ranks("support.backend_ranks:misuse", (), 3, tmp_path)
    for rank in found:
        assert (
            "rank 0, 2: all_reduce SUM of torch.float32, 12 bytes; rank 1: all_reduce" in rank["other sizes"]
        )
        assert re.search(r"rank 0, 2: broadcast, 16 bytes, root 0; rank 1: all_reduce", rank["other calls"])
        assert (
            "rank 0: all_reduce MIN of torch.float32, 16 bytes; rank 1, 2: all_reduce MAX"
            in rank["other operators"]
        )
        assert "BAND of torch.float32 is not defined" in rank["bits of floats"]
        assert "1 tensors for 3 ranks" in rank["one tensor too few"]
        assert rank["sparse"] == "nothing"
        assert rank["alive"] == [3.0] * 5
        told, total = rank["in a forked process"]
        assert "was forked from rank" in told
        assert total == [3.0] * 5
        assert rank["cpu:dure"] == [3.0] * 5
        assert rank["as a future"] == [6.0] * 5
        assert "Default process group has not been initialized" in rank["destroyed"]
    assert "waited 1 s for rank 1 in barrier; it lives, but never came" in found[0]["late"]
    assert "an earlier collective of this process group failed" in found[0]["after that"]
    assert re.search(r"[Rr]ank 1", found[0]["monitored"])


def test_barriers_beyond_32_bits(tmp_path):
    assert on_ranks("support.backend_ranks:wrap_around", (), 2, tmp_path) == [[[2.0] * 5] * 30] * 2


def test_a_killed_rank_is_named_at_once(tmp_path):
    ran = script(f"--run-dir={tmp_path / 'run'}", "-m", "support.backend_ranks", "lose", code=1)
    told = re.findall(
        r"TOLD PeerLost: rank \d lost rank 1 in \w+: process \d+ is gone after [0-2] s", ran.stdout
    )
    assert told
    assert "rank 1" in ran.stderr.splitlines()[-1]


@pytest.mark.parametrize("how", [pytest.param("destroy", marks=pytest.mark.soak), "leave", "alone"])
def test_a_script_ends_however_it_leaves_its_group(how, tmp_path):
    before = shared_memory()
    ran = script(f"--run-dir={tmp_path / 'run'}", "-m", "support.backend_ranks", how)
    assert len(re.findall(r"rank \d is done", ran.stdout)) == 3
    no_new_shared_memory(before)


def test_import_torch_knows_the_backend_without_importing_dure_s_rooms():
    code = (
        "import sys, torch, torch.distributed as dist\n"
        "assert 'dure' in dist.Backend.backend_list and dist.Backend.default_device_backend_map['cpu'] == 'gloo'\n"
        "print(sorted(name for name in sys.modules if name.startswith('dure')))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert ran.stdout.strip() == "['dure', 'dure.backend']"
    without = (
        "import torch.distributed as d; assert 'dure' not in d.Backend.backend_list\nimport dure.backend\n"
    )
    without += "assert 'dure' in d.Backend.backend_list"
    env = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    subprocess.run([sys.executable, "-c", without], env=env, timeout=120, check=True)


@pytest.mark.soak
@pytest.mark.parametrize("library", ["accelerate", "fabric", "trainer", "compiled"])
def test_other_peoples_loops_have_the_losses_that_they_have_on_gloo(library, tmp_path):
    """Unchanged but for the backend's word; torch.compile(DDP) too."""
    pytest.importorskip({"fabric": "lightning_fabric", "trainer": "transformers"}.get(library, "accelerate"))
    found = {}
    for backend in ("gloo", "dure"):
        ran = script(
            f"--run-dir={tmp_path / backend}", "-m", "support.backend_loops", library, backend, ranks=2
        )
        losses, found[backend] = json.loads(ran.stdout.splitlines()[-1])
        found[backend, "losses"] = losses
    assert found["dure", "losses"] == pytest.approx(found["gloo", "losses"], rel=1e-5)
    assert found["dure"] == found["gloo"]  # of two numbers there is but one sum


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(["gloo"], id="gloo"),
        pytest.param([], id="nothing", marks=pytest.mark.soak),
        pytest.param(["gloo", "--cold"], id="cold", marks=pytest.mark.soak),
    ],
)
def test_a_script_that_says_gloo_or_nothing_gets_dure_and_the_run_says_so(asked, tmp_path):
    words = [word for word in asked if word != "--cold"]
    options = ["--backend=dure", f"--run-dir={tmp_path / 'run'}", *(["--cold"] if "--cold" in asked else [])]
    ran = script(*options, str(FOLDER / "stock_gloo.py"), *words, ranks=2)
    expected = "ProcessGroupDure is called " + ("gloo" if words else "")
    assert ran.stdout.count(expected) == 2, ran.stdout
    told = "--backend dure: the script asked for gloo and gets dure; its collectives go through shared memory"
    assert ran.stderr.count(told) == 1


def test_without_the_option_a_script_keeps_gloo_and_another_backend_is_refused(tmp_path):
    ran = script(f"--run-dir={tmp_path / 'run'}", str(FOLDER / "stock_gloo.py"), "gloo", ranks=2)
    assert ran.stdout.count("ProcessGroup is called gloo") == 2
    refused = script("--backend=nccl", str(FOLDER / "stock_gloo.py"), code=2)
    assert "--backend is 'nccl'; use dure" in refused.stderr


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_torchs_own_tests_of_a_backend_pass_where_they_pass_on_gloo(tmp_path, monkeypatch):
    """torch.testing's distributed_test, as far as it runs without GPUs and in one launch."""
    pytest.importorskip("expecttest")
    found = {}
    for kind, options in {"ProcessGroup": [], "ProcessGroupDure": ["--backend=dure"]}.items():
        monkeypatch.setenv("EXPECTED_GROUP", kind)
        monkeypatch.setenv("TEMP_DIR", str(tmp_path / kind))
        ran = script(
            f"--run-dir={tmp_path / f'{kind}-run'}", *options, str(FOLDER / "torch_tests.py"), timeout=1200
        )
        found[kind] = json.loads(
            next(line for line in ran.stdout.splitlines() if line.startswith('{"passed"'))
        )
    lost = set(found["ProcessGroup"]["passed"]) - set(found["ProcessGroupDure"]["passed"])
    assert {name: found["ProcessGroupDure"]["failed"].get(name, "skipped") for name in lost} == {}
    assert len(found["ProcessGroupDure"]["passed"]) > 60
