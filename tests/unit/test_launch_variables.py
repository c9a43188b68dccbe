"""`python -m dure.launch` under SkyPilot and TorchX: what their variables say becomes options."""

import os
import subprocess
import sys

import pytest
from support.nodes_stories import put_job

from dure.base.errors import UsageError
from dure.base.team_key import make_key_file
from dure.launch.variables import command_for
from dure.tools.bench.ports import free_ports

SKY = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.1.10\n10.0.1.11\n", "SKYPILOT_NUM_NODES": "2"}
TORCHX = {"TORCHX_REPLICA_IDX": "1", "TORCHX_RANK0_HOST": "job-0.svc"}


def own():
    return "10.9.9.9"


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        (["job.toml"], {}, ["train", "job.toml"]),
        (["ddp.py", "--lr", "1"], {}, ["run", "ddp.py", "--lr", "1"]),
        (["run", "-m", "pkg", "x.toml"], {}, ["run", "-m", "pkg", "x.toml"]),
        (["job.toml"], SKY, ["train", "--nodes=2", "--node-rank=1", "--leader=10.0.1.10:29400", "job.toml"]),
        (
            ["job.toml"],
            {**SKY, "MASTER_PORT": "30000"},
            ["train", "--nodes=2", "--node-rank=1", "--leader=10.0.1.10:30000", "job.toml"],
        ),
        (
            ["--nodes=1:2", "job.toml"],
            SKY,
            ["train", "--node-rank=1", "--leader=10.0.1.10:29400", "--nodes=1:2", "job.toml"],
        ),
        (
            ["job.toml"],
            {**SKY, "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.1.10"},
            ["train", "job.toml"],
        ),
        (
            ["job.toml", "--node-rank", "0", "--leader=a:1"],
            SKY,
            ["train", "job.toml", "--node-rank", "0", "--leader=a:1"],
        ),
        (
            ["run", "--nodes", "2", "ddp.py"],
            TORCHX,
            ["run", "--node-rank=1", "--leader=job-0.svc:29400", "--nodes", "2", "ddp.py"],
        ),
        (
            ["--nodes=2", "job.toml"],
            {"TORCHX_REPLICA_IDX": "0", "TORCHX_RANK0_HOST": "localhost"},
            ["train", "--node-rank=0", "--leader=10.9.9.9:29400", "--nodes=2", "job.toml"],
        ),
        (["job.toml"], {"TORCHX_REPLICA_IDX": "0", "TORCHX_RANK0_HOST": "localhost"}, ["train", "job.toml"]),
        (
            ["--nodes=2", "job.toml"],
            {"TORCHX_REPLICA_IDX": "1", "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.7"},
            ["train", "--node-rank=1", "--leader=10.0.0.7:29400", "--nodes=2", "job.toml"],
        ),
    ],
)
def test_variables_become_options_and_options_win(argv, environ, words):
    assert command_for(argv, environ, own) == words


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        ([], {}, "say what to start"),
        (["job.toml"], {"SKYPILOT_NODE_RANK": "0"}, "not SKYPILOT_NODE_IPS"),
        (["job.toml"], {**SKY, "SKYPILOT_NODE_RANK": "2"}, "a whole number from 0 to 1"),
        (["job.toml"], {**SKY, "SKYPILOT_NODE_RANK": "²"}, "a whole number from 0 to 1"),
        (["job.toml"], TORCHX, "how many replicas"),
        (["--nodes=2", "job.toml"], {"TORCHX_REPLICA_IDX": "1"}, "not TORCHX_RANK0_HOST"),
    ],
)
def test_half_of_what_is_needed_is_refused(argv, environ, words):
    with pytest.raises(UsageError, match=words):
        command_for(argv, environ, own)


def test_two_nodes_by_skypilots_variables_train_together(tmp_path):
    job = put_job(tmp_path, 5)
    make_key_file(tmp_path / "team.key")
    run = tmp_path / "checkpoints" / "run"

    (port,) = free_ports(1)

    def start(node):
        here = {"SKYPILOT_NODE_RANK": str(node), "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1"}
        return subprocess.Popen(
            [sys.executable, "-m", "dure.launch", job, "--run-dir", run, "--team-key", tmp_path / "team.key"],
            env={**os.environ, **SKY, **here, "MASTER_PORT": str(port)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    first, second = start(0), start(1)
    said = [process.communicate(timeout=300)[1].decode() for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), said
    assert "ranks 0-1 on" in said[0]
    assert "ranks 2-3 on" in said[0]
