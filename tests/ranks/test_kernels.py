"""What kernels really compute is in the recipe, and ranks that compute differently are refused before step 0."""

import json
import os
import re
import subprocess
import sys

from support.commands import EXAMPLES, train

from dure.tools.bench.ports import free_ports

SHORT = (
    "--ranks",
    "1",
    "--set",
    "data.args.count=64",
    "--set",
    "train.epochs=1",
    "--set",
    "eval.args.count=8",
)
START = """
import sys, argparse, dure
dure.start(argparse.Namespace(rank=int(sys.argv[1]), world_size=2, master=sys.argv[2]))
"""


def recipe_of(folder):
    (manifest,) = (folder / "checkpoints").glob("step-*/manifest.json")
    return json.loads(manifest.read_text())["facts"]["recipe_words"]


def test_three_kinds_of_kernels_are_three_recipes(tmp_path):
    """MKL_CBWR chooses MKL's kernels behind torch's back."""
    found = {}
    for kind in ("", "AVX2", "COMPATIBLE"):
        folder = tmp_path / f"run-{kind}"
        env = {"MKL_CBWR": kind} if kind else {}
        summary = train(EXAMPLES / "cnn_batchnorm.toml", folder, *SHORT, **env).summary
        arithmetic = recipe_of(folder)["arithmetic"]
        found[kind] = (summary["recipe"], json.dumps(arithmetic), summary["weights_sha256"])
    assert len({recipe for recipe, _, _ in found.values()}) == 3
    assert found[""][1] != found["COMPATIBLE"][1]
    for one in found.values():
        for other in found.values():  # other bits are never a surprise
            assert one[1] != other[1] or one[2] == other[2]


def test_two_ranks_of_different_arithmetic_are_refused_by_operation():
    (port,) = free_ports(1)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", START, str(rank), f"127.0.0.1:{port}"],
            env={**os.environ, "OMP_NUM_THREADS": "1", **kernels},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, kernels in enumerate(({}, {"MKL_CBWR": "COMPATIBLE"}))
    ]
    for rank in ranks:
        _, said = rank.communicate(timeout=200)
        assert rank.returncode != 0
        assert "computes other bits than rank 0" in said
        assert "matmul" in said
        assert 'team.arithmetic = "portable"' in said
        assert "Traceback" not in said


def test_two_nodes_of_different_arithmetic_are_refused_by_operation_before_training(tmp_path):
    (tmp_path / "key").write_text("0123456789abcdef0123456789abcdef")
    (tmp_path / "key").chmod(0o600)
    where = [
        "--leader",
        f"127.0.0.1:{free_ports(1)[0]}",
        "--team-key",
        tmp_path / "key",
        "--run-dir",
        tmp_path / "run",
    ]
    line = [
        sys.executable,
        "-m",
        "dure",
        "train",
        EXAMPLES / "cnn_batchnorm.toml",
        "--nodes",
        "2",
        "--ranks",
        "1",
    ]
    nodes = [
        subprocess.Popen(
            [str(word) for word in (*line, *where, "--node-rank", node)],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node, variables in enumerate(({}, {"MKL_CBWR": "COMPATIBLE"}))
    ]
    for node in nodes:
        _, told = node.communicate(timeout=400)
        assert node.returncode == 2, told
        assert re.search(r"rank 1 .* computes other bits than rank 0 .*: .*matmul", told), told
        assert "step 1/" not in told
