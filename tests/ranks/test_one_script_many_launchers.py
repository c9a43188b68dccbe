"""The same ddp.py, unchanged, under dure run, torchrun, plain python and by hand: the same bits each time."""

import os
import re
import socket
import subprocess
import sys

import pytest
from support import FOLDER
from support.commands import EXAMPLES, dure

from dure.tools.bench.ports import free_ports

SCRIPT = EXAMPLES / "ddp.py"


@pytest.fixture
def script(storage):
    """The demo put the script beside its data, as on a shared storage."""
    assert (storage / "ddp.py").read_bytes() == SCRIPT.read_bytes()
    return storage / "ddp.py"


def fingerprints(output, ranks):
    found = dict(re.findall(rf"rank (\d+) of {ranks}: (\w{{16}})", output))
    assert sorted(map(int, found)) == list(range(ranks)), output
    return set(found.values())


def run(command, **env):
    ran = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **env},
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_under_dure_run(script, script_alone, tmp_path):
    own = ["--epochs", 1, "--save", tmp_path / "saved"]
    ended = dure("run", script, "--ranks", 4, "--run-dir", tmp_path / "run", "--", *own)
    assert ended.code == 0, ended.err
    assert list((tmp_path / "saved").glob("step-000000010-*"))
    assert fingerprints(ended.out, 4) == {script_alone}
    assert "rank 3 of 4" in (tmp_path / "run" / "logs" / "rank-3.log").read_text()


def torchrun(logs):
    own = [
        "--standalone",
        "--nproc_per_node=2",
        "--log-dir",
        logs,
    ]  # it would leave a folder in /tmp otherwise
    return [sys.executable, "-m", "torch.distributed.run", *own]


def test_under_torchrun(script, script_alone, tmp_path):
    said = run([*torchrun(tmp_path / "logs"), script], OMP_NUM_THREADS="1")
    assert fingerprints(said, 2) == {script_alone}


def test_a_team_whose_model_outlives_it_ends_under_torchrun(tmp_path):
    """Neither process ended: the model destroyed the group with the GIL held, for which Gloo's thread waited."""
    said = run([*torchrun(tmp_path / "logs"), FOLDER / "leaving.py"], OMP_NUM_THREADS="1")
    assert sorted(re.findall(r"rank \d is done", said)) == ["rank 0 is done", "rank 1 is done"]


def by_hand(script, rank, port, size):
    command = [sys.executable, script, "--rank", rank, "--world-size", size, "--master", f"127.0.0.1:{port}"]
    return subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def free_port():
    return str(free_ports(1)[0])


def test_by_hand_in_several_terminals_as_the_document_draws_it(script, script_alone):
    port = free_port()
    ranks = [by_hand(script, rank, port, 3) for rank in (2, 0, 1)]
    told = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], told
    assert fingerprints("".join(out for out, _ in told), 3) == {script_alone}


def test_by_hand_a_port_in_use_is_told(script):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        rank = by_hand(script, 0, port, 2)
        _, err = rank.communicate(timeout=300)
    assert rank.returncode != 0
    assert f"port {port} on 127.0.0.1 is in use" in err


def test_by_hand_a_rank_that_never_comes_is_named(script):
    code = (
        "import sys, runpy; import dure.comm.group as group; group.JOIN_SECONDS = 3.0\n"
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", code, script, "--rank", 0, "--world-size", 3]
    ran = subprocess.run(
        [*map(str, command), "--master", f"127.0.0.1:{free_port()}"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode != 0
    assert "for rank(s) 1, 2; start all 3 ranks" in ran.stderr
