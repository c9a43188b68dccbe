"""Portable arithmetic: the weights that another vendor's or generation's CPU gave, on any x86-64 CPU with AVX2."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import FOLDER
from support.commands import EXAMPLES, dure, train

FLAGS = set(Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split())
pytestmark = pytest.mark.skipif(not {"avx2", "fma"} <= FLAGS, reason="needs an x86-64 CPU with AVX2 and FMA")

GOLDEN = {
    "three_weights": "62d6eab2aefbc10bb257b7d3a28c45eff5082b379e012fc2f45e6ea930b6f7ae",
    "tiny_transformer": "e3e031887a70f3ede91da8865438ebb3b860fc27277e54872093a6cc89a9e019",
    "cnn_batchnorm": "31d97967c007295cbd09258bf668b41e9aa92161e068e62eca5c1f7003a71cf9",
    "cats": "2b1d1fc93b7a6a1578cf143cb398526fc1674ed491a38de76db3c52eeea228ce",
}
"""weights_sha256 with torch 2.13.0, measured on an AMD Zen 3 (AVX2, no AVX-512)."""


@pytest.mark.parametrize(
    "name",
    [
        "three_weights",
        "tiny_transformer",
        pytest.param("cnn_batchnorm", marks=pytest.mark.soak),
        pytest.param("cats", marks=pytest.mark.soak),
    ],
)
def test_portable_weights_are_those_of_another_cpu(name, storage, tmp_path):
    options = ("--set", f"storage={storage}") if name == "cats" else ()
    portable = ("--ranks", 2, "--set", "team.arithmetic=portable")
    ended = train(EXAMPLES / f"{name}.toml", tmp_path / "run", *portable, *options)
    assert ended.summary["weights_sha256"] == GOLDEN[name]


def test_a_script_draws_and_compiles_portably_under_dure_run(tmp_path):
    ended = dure(
        "run", "--arithmetic", "portable", "--ranks", 2, "--run-dir", tmp_path / "run", FOLDER / "portable.py"
    )
    assert ended.code == 0, ended.err
    found = [json.loads(line) for line in ended.out.splitlines() if line.startswith("{")]
    assert len(found) == 2
    for rank in found:
        assert rank["capability"] == "AVX2"
        assert rank["as uniform"]
        assert "exponential_" in rank["refused"]
        if "GenuineIntel" not in Path("/proc/cpuinfo").read_text():  # there, MKL draws torch's own masks
            assert rank["as stock"]


def test_a_script_started_otherwise_is_refused_with_the_way_out():
    ran = subprocess.run(
        [sys.executable, "-c", "import dure; dure.start(arithmetic='portable')"],
        env={**os.environ, "MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ran.returncode != 0
    assert "dure run --arithmetic portable SCRIPT" in ran.stderr
    assert "ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2" in ran.stderr
    assert "Traceback" not in ran.stderr
