"""The scripts of examples/migrate: those that moved to dure give the same losses on any number of ranks."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import dure

MIGRATE = Path(__file__).parents[2] / "examples" / "migrate"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
FABRIC = [
    sys.executable,
    "-m",
    "lightning_fabric.cli",
    "run",
    "--accelerator=cpu",
    "--strategy=ddp",
    "--devices=2",
]


def losses(text):
    return re.findall(r"epoch \d: loss ([\d.]+)", text)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A copy: what the examples save is not saved beside them."""
    there = shutil.copytree(MIGRATE, tmp_path / "migrate")
    monkeypatch.chdir(there)
    return there


@pytest.mark.parametrize(
    "script",
    [
        "from_torchrun.py",
        pytest.param("from_accelerate.py", marks=pytest.mark.soak),
    ],  # from_fabric.py is the same
)
def test_a_script_that_moved_has_the_same_losses_on_1_and_3_ranks(folder, script):
    told = []
    for ranks in (1, 3):
        ended = dure("run", "--ranks", ranks, script)
        assert ended.code == 0, ended.err
        told.append(losses(ended.out))
    assert len(told[0]) == 5
    assert told[0] == told[1]


def test_what_moved_from_fabric_is_what_moved_from_accelerate():
    one, other = ((MIGRATE / name).read_text() for name in ("from_fabric.py", "from_accelerate.py"))
    assert one.replace("from_fabric", "from_accelerate") == other


@pytest.mark.soak
@pytest.mark.parametrize(
    ("command", "script"),
    [(TORCHRUN, "with_torchrun.py"), (TORCHRUN, "with_accelerate.py"), (FABRIC, "with_fabric.py")],
)
def test_the_scripts_as_they_were_run_too(folder, command, script):
    ran = subprocess.run([*command, script], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    assert len(losses(ran.stdout)) == 5
