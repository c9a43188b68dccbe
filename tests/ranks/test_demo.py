"""`dure demo` from an installed wheel, outside of the project: 400 photos, 4 ranks, ≥ 95 % held out."""

import json
import os
import subprocess
import sys

import pytest
from support.commands import ROOT

SOURCES = ["pyproject.toml", "README.md", "LICENSE", "src"]


@pytest.mark.soak
def test_the_demo_works_from_an_installed_wheel_and_learns(tmp_path):
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    source = tmp_path / "source"  # a build writes beside its sources; leave the project's alone
    source.mkdir()
    subprocess.run(["cp", "-rL", *SOURCES, source], cwd=ROOT, check=True)
    subprocess.run([*pip, "--target", str(site), str(source)], check=True, timeout=200)
    env = {**os.environ, "PYTHONPATH": str(site)}
    where = subprocess.run(
        [sys.executable, "-c", "import dure; print(dure.__file__)"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert where.stdout.startswith(str(site))
    ran = subprocess.run(
        [sys.executable, "-m", "dure", "demo", "--json"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    summary = json.loads(ran.stdout.splitlines()[-1])
    assert summary["ranks"] == 4
    assert len(set(summary["fingerprints"])) == 1
    assert len(summary["fingerprints"]) == 4
    assert summary["samples"] == 400
    assert summary["ledger"]["exactly_once"] is True
    assert summary["ledger"]["eval_exactly_once"] is True
    assert summary["metrics"]["accuracy"] >= 0.95
    assert summary["completely_recorded"] is True
    print(f"training {summary['seconds']['train']} s, held out {summary['metrics']['accuracy']:.0%}")
    shared = tmp_path / "shared"
    assert sorted(path.name for path in shared.iterdir()) == [
        "checkpoints",
        "ddp.py",
        "models",
        "training_data",
    ]
    assert len(list((shared / "training_data" / "train").glob("*.png"))) == 400
