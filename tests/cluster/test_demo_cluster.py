"""`make demo-cluster`, shortened: image, lab, doctor, two nodes of four ranks, and the same weights as on one rank."""

import os
import subprocess
from pathlib import Path

import pytest

from dure.tools.lab import why_not_here
from dure.tools.lab.remote import why_no_ssh

ROOT = Path(__file__).parents[2]
REASON = why_not_here() or why_no_ssh()
if not (ROOT / ".venv" / "bin" / "dure").exists():
    REASON = REASON or "no .venv: make setup"


@pytest.mark.soak
@pytest.mark.skipif(REASON is not None, reason=f"lab: {REASON}")
def test_the_documents_picture_gives_the_weights_of_one_rank(image, tmp_path):
    ran = subprocess.run(
        [ROOT / "tools" / "demo-cluster", "--set", "train.epochs=1"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "IMAGE": str(image), "STORAGE": str(tmp_path / "shared")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "2 nodes x 4 ranks in the image, and 1 rank without any of it: the same weights" in ran.stdout
    assert "ranks 0-3 on node0 (10.0.1.10), ranks 4-7 on node1 (10.0.1.11)" in ran.stderr
    assert "verified" in ran.stdout
    assert not [name for name in os.listdir("/run/dure-lab") if name.startswith("demo-")]
