"""The same ranks may be a team, and then another one, as in a script that tries two seeds."""

import re
import subprocess
import sys

import pytest
from support import FOLDER
from support.commands import dure
from test_one_script_many_launchers import by_hand, run

from dure.tools.bench.ports import free_ports

SCRIPT = FOLDER / "two_teams.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


def fingerprints(output, ranks):
    """Of each seed's model, in the order of the teams, the same on all ranks."""
    told = [re.findall(rf"rank {rank} of {ranks}, seed (\d): (\w{{16}})", output) for rank in range(ranks)]
    assert [seed for seed, _ in told[0]] == ["1", "2", "1"], output
    assert all(of_rank == told[0] for of_rank in told), output
    # A team that is over leaves nothing open: no socket of its process group, and so no model either.
    descriptors = re.findall(r"descriptors: (\d+)", output)
    assert len(descriptors) == 3 * ranks, output
    assert len(set(descriptors)) == 1 or ranks > 1, output
    return [fingerprint for _, fingerprint in told[0]]


@pytest.fixture(scope="module")
def alone():
    """What one rank gets, with teams of its own."""
    found = fingerprints(run([sys.executable, SCRIPT]), 1)
    assert found[0] == found[2] != found[1]
    return found


def test_under_dure_run(alone, tmp_path):
    ended = dure("run", SCRIPT, "--ranks", 2, "--run-dir", tmp_path / "run")
    assert ended.code == 0, ended.err
    assert fingerprints(ended.out, 2) == alone


@pytest.mark.soak
def test_under_torchrun(alone, tmp_path):
    command = [*TORCHRUN, "--log-dir", tmp_path / "logs", SCRIPT]
    assert fingerprints(run(command, OMP_NUM_THREADS="1"), 2) == alone


@pytest.mark.soak
def test_by_hand(alone):
    (port,) = free_ports(1)
    ranks = [by_hand(SCRIPT, rank, port, 2) for rank in (1, 0)]
    try:
        told = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], told
    assert fingerprints("".join(out for out, _ in told), 2) == alone


def test_by_hand_a_rank_that_does_not_come_to_the_second_team_is_named():
    code = (
        "import argparse, sys, dure, dure.comm.group as group\n"
        "args = argparse.ArgumentParser(parents=[dure.arguments()]).parse_args()\n"
        "dure.start(args).done()\n"
        "group.JOIN_SECONDS = 3.0\n"
        "if args.rank: sys.exit(input())\n"
        "dure.start(args)"
    )
    (port,) = free_ports(1)
    where = ["--world-size", "2", "--master", f"127.0.0.1:{port}"]
    first, second = (
        subprocess.Popen(
            [sys.executable, "-c", code, "--rank", str(rank), *where],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    )
    try:
        assert "rank 0 waited 3 s at" in (told := first.communicate(timeout=300)[1])
        assert "for rank(s) 1; start all 2 ranks" in told
        assert second.communicate("\n", timeout=300)[1] == "\n"
    finally:
        for rank in (first, second):
            rank.kill()
            rank.communicate()
