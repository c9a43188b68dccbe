"""The reduce is a plain tree sum's bits, whatever way gradients take, and leaks nothing."""

import os
import subprocess
import sys

import pytest
from support import reduces
from support.leftovers import no_new_shared_memory, shared_memory

from dure.base.run_folder import RunFolder
from dure.launch import run_team


def on_ranks(entry, args, ranks, tmp_path):
    folder = RunFolder(tmp_path / f"run-{ranks}")
    return run_team(
        f"support.reduces:{entry}", args, ranks=ranks, folder=folder, hang_seconds=300, grace_seconds=0.5
    )


def test_random_reduces_on_1_and_8_ranks_are_the_plain_tree_sums_bits(tmp_path):
    assert reduces.trials(60, 1) == []  # in this process
    assert on_ranks("trials", (60, 8), 8, tmp_path) == [[]] * 8


def test_random_reduces_on_3_ranks_also_with_a_bf16_wire_and_over_gloo(tmp_path):
    """One launch for all four ways."""
    ways = [("fp32", "auto"), ("bf16", "auto"), ("bf16", "gloo"), ("fp32", "gloo")]
    cases = [(60 if way == ways[0] else 40, 7, *way) for way in ways]
    for rank, wrong in enumerate(on_ranks("trials_of", (cases,), 3, tmp_path)):
        assert dict(zip(ways, wrong, strict=True)) == {way: [] for way in ways}, f"rank {rank}"


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8])
def test_a_thousand_random_reduces_on_every_number_of_ranks(ranks, tmp_path):
    assert on_ranks("trials", (1000, 100 + ranks), ranks, tmp_path) == [[]] * ranks


def is_flat(seen, allowed=8 << 20):
    """Memory and descriptors do not grow: the least of the last third is the least of the third before.

    Not what is seen at one moment: a peer may just hold what it is about to let go of.
    """
    third = len(seen) // 3
    (memory, files), (memory_before, files_before) = (
        map(min, zip(*part, strict=True)) for part in (seen[-third:], seen[-2 * third : -third])
    )
    return memory - memory_before < allowed and files <= files_before


def test_reduces_and_buckets_made_anew_leave_memory_descriptors_and_dev_shm_as_they_were(tmp_path):
    """Ten thousand reduces, then 60 rebuilds as DDP makes them: nothing grows, nothing has a name."""
    before = shared_memory()
    for many, rebuilds in on_ranks("many_then_rebuilds", (10_000, 60), 4, tmp_path):
        print([(resident >> 20, files) for resident, files in many])
        assert is_flat(many)
        assert is_flat(rebuilds, allowed=16 << 20)
    no_new_shared_memory(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a small /dev/shm of its own")
@pytest.mark.parametrize("options", ["size=64k", "size=8k", "size=1m,nr_inodes=3", "ro"])
def test_a_small_or_read_only_dev_shm_is_told_once_and_changes_no_bit(options, tmp_path):
    """In a mount namespace of its own, as in a container."""
    code = (
        "import sys; from pathlib import Path\n"
        "from dure.launch import run_team; from dure.base.run_folder import RunFolder\n"
        "wrong = run_team('support.reduces:trials', (12, 5), ranks=3, folder=RunFolder(Path(sys.argv[1])),"
        " hang_seconds=300)\n"
        "assert wrong == [[]] * 3, wrong\n"
    )
    script = f'mount -t tmpfs -o {options} tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", code]
    ran = subprocess.run(
        [*command, str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    told = "".join((tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text() for rank in range(3))
    assert told.count("buckets are copied instead") == 1
