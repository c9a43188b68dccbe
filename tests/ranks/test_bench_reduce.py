"""The reduce bench measures what it says, on one node and on two, and leaves nothing behind."""

import json
import os
import subprocess
import sys

import psutil
import pytest
from support.commands import dure
from support.leftovers import all_gone, family, no_new_family, no_new_shared_memory, shared_memory

from dure.base.errors import DureError, UsageError
from dure.tools.bench import openmpi, reduce
from dure.tools.lab import why_not_here

NOT_HERE = why_not_here()


def test_one_node_is_measured_beside_every_peer_that_is_installed(tmp_path):
    ended = dure(
        "bench", "reduce", "--ranks", 2, "--mib", "0.0625,1", "--rounds", 2, "--json", TMPDIR=tmp_path
    )
    figures = ended.summary
    assert (figures["ranks"], figures["nodes"], figures["rate"], figures["rounds"]) == (2, 1, None, 2)
    assert [row["mib"] for row in figures["results"]] == [0.0625, 1]
    for row in figures["results"]:
        assert row["dure_ms"] > 0
        assert row["gloo_ms"] > 0
        assert row["memcpy_ms"] > 0
        assert (row["openmpi_ms"] is not None) == openmpi.is_installed()
        if openmpi.is_installed():
            assert row["of_openmpi"] == pytest.approx(row["dure_ms"] / row["openmpi_ms"], abs=1e-3)
        assert row["bar"] == 1.0
        assert row["wire_limit_ms"] is row["bytes_a_to_b"] is row["bytes_b_to_a"] is None
    # torch makes an empty folder for its compiler; nothing of ours is left.
    assert [path for path in tmp_path.iterdir() if not path.name.startswith("torchinductor_")] == []


@pytest.mark.skipif(NOT_HERE is not None, reason=f"two nodes: {NOT_HERE}")
@pytest.mark.parametrize(
    ("wire", "share"), [pytest.param("fp32", 1.0, marks=pytest.mark.soak), ("bf16", 0.5)]
)
def test_two_nodes_send_each_bucket_once_a_direction_and_half_of_it_as_bf16(wire, share):
    figures = reduce.bench_reduce(ranks=2, nodes=2, rate="10gbit", mib=[1.0], rounds=2, wire=wire)
    assert (figures["ranks"], figures["nodes"], figures["rate"], figures["wire"]) == (2, 2, "10gbit", wire)
    (row,) = figures["results"]
    for name in ("dure_ms", "gloo_ms", "memcpy_ms", "wire_limit_ms"):
        assert row[name] > 0
    assert row["openmpi_ms"] is None
    for way in ("bytes_a_to_b", "bytes_b_to_a"):
        assert share * 2**20 <= row[way]["dure"] < 1.2 * share * 2**20
        assert row[way]["gloo"] > 1.4 * 2**20  # a ring over 4 ranks: 2 × 3/4 of the bucket
    assert json.loads(json.dumps(figures)) == figures
    words = reduce.in_words(figures)
    for part in ("2 nodes × 2 ranks", "10gbit", wire, "plain TCP", "on the link"):
        assert part in words


def test_what_has_a_bar_is_measured_by_default():
    bars = [1 / 1024, 4 / 1024, 16 / 1024, 64 / 1024, 256 / 1024, 1.0]
    assert [size for size in reduce.SIZES if size <= reduce.LARGEST_WITH_BAR] == bars


def test_a_peer_that_is_not_installed_is_null_and_said():
    row = {
        "mib": 1.0,
        "dure_ms": 1.0,
        "gloo_ms": 5.0,
        "openmpi_ms": None,
        "memcpy_ms": 0.5,
        "wire_limit_ms": None,
        "of_openmpi": None,
        "bar": 1.0,
    }
    figures = {"ranks": 4, "nodes": 1, "rate": None, "rounds": 1, "exchanger": "x", "results": [row]}
    words = reduce.in_words(figures)
    assert "5.0 ×" in words
    assert "bar" not in words
    beside = reduce.in_words(
        {**figures, "results": [{**row, "mib": 1 / 1024, "openmpi_ms": 2.0, "of_openmpi": 0.5}]}
    )
    assert "1 KiB" in beside
    assert "0.50 of OpenMPI (bar: ≤ 1)" in beside
    assert "OpenMPI is not installed: apt-get install openmpi-bin python3-mpi4py" in words


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"nodes": 3}, "--nodes is 3"),
        ({"ranks": 1}, "--ranks is 1"),
        ({"rate": "1gbit"}, "add --nodes 2"),
        ({"nodes": 2, "rate": "fast"}, "such as 10gbit"),
        ({"wire": "fp8"}, "--wire is 'fp8'; use fp32 or bf16"),
        ({"rounds": 0}, "--rounds is 0"),
        ({"mib": [1.0, 0.0]}, "--mib 0 cannot be measured"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(options, complaint):
    with pytest.raises(UsageError, match=complaint):
        reduce.bench_reduce(**options)


@pytest.mark.skipif(not openmpi.is_installed(), reason="OpenMPI or mpi4py is not installed")
def test_openmpi_answers_and_leaves_nothing_also_when_one_of_its_ranks_is_killed(tmp_path):
    others = family()  # the test Slurm's daemons, if it runs
    with openmpi.beside(tmp_path, 2), openmpi.Asker(tmp_path, 2) as asker:
        assert 0 < asker.seconds(1000, 3) < 300
    no_new_family(others)
    (tmp_path / "again").mkdir()
    with openmpi.beside(tmp_path / "again", 2), openmpi.Asker(tmp_path / "again", 2) as asker:
        started = family() - others
        victim = next(process for process in started if is_peer(process))
        victim.kill()
        with pytest.raises(DureError, match="one of OpenMPI's ranks has ended"):
            asker.seconds(1000, 3)
    no_new_family(others)


def is_peer(process):
    """Whether it is one of OpenMPI's ranks."""
    try:
        return "mpi_peer.py" in " ".join(process.cmdline()[1:2])
    except psutil.NoSuchProcess:
        return False


@pytest.mark.skipif(not openmpi.is_installed(), reason="OpenMPI or mpi4py is not installed")
def test_a_killed_bench_takes_openmpi_with_it(tmp_path):
    before = shared_memory()
    code = (
        "import sys, time; from pathlib import Path; from dure.tools.bench import openmpi\n"
        "with openmpi.beside(Path(sys.argv[1]), 2), openmpi.Asker(Path(sys.argv[1]), 2):\n"
        "    print('ready', flush=True); time.sleep(600)"
    )
    path = os.pathsep.join(filter(None, sys.path))
    bench = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    with bench:
        try:
            assert bench.stdout.readline() == b"ready\n"
            started = psutil.Process(bench.pid).children(recursive=True)
            assert len(started) >= 3
        finally:
            bench.kill()
    all_gone(started)
    no_new_shared_memory(before)
