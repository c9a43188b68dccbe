"""`dure submit --engine ray` on a real Ray with its dashboard, which takes jobs."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.alone import train_alone
from support.commands import dure
from support.leftovers import wait_until
from support.nodes_stories import furthest_step, put_job, set_pace

from dure.tools.bench.ports import free_ports

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
]

ADDRESS = "127.0.0.2"
STEPS = 60


@pytest.fixture
def ray_head():
    """A Ray of one node, started as a user does; returns the dashboard's address."""
    folder = Path(tempfile.mkdtemp(prefix="dure-ray-", dir="/tmp"))
    port, dashboard, client = free_ports(3)
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    environ = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(folder)}
    with (folder / "head.out").open("wb") as out:
        head = subprocess.Popen(
            [
                *(*ray, "start", "--head", "--block", f"--node-ip-address={ADDRESS}", f"--port={port}"),
                *("--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", "--num-cpus=4"),
                *(f"--ray-client-server-port={client}", "--object-store-memory=80000000"),
                f"--temp-dir={folder}",
            ],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    at = f"127.0.0.1:{dashboard}"
    try:
        wait_until(
            lambda: dure("status", "--engine", "ray", "--ray-address", at).code == 0, "the dashboard", 240
        )
        yield at
    finally:
        head.terminate()
        head.wait(120)
        shutil.rmtree(folder, ignore_errors=True)


def test_a_job_is_submitted_asked_for_read_and_cancelled_and_goes_on(ray_head, tmp_path):
    job = put_job(tmp_path, STEPS, 0.02)
    run = tmp_path / "checkpoints" / "submitted"
    to = ["--engine", "ray", "--ray-address", ray_head]
    submit = ["submit", job, *to, "--nodes", "2", "--run-dir", run, "--json"]

    def state(job_id):
        asked = dure("status", job_id, *to, "--json")
        assert asked.code == 0, asked.err
        return json.loads(asked.out)["jobs"][0]["state"]

    # A dashboard that has just started may refuse connections once more.
    first = wait_until(lambda: ran if (ran := dure(*submit)).code == 0 else None, "the job's submission", 240)
    job_id = json.loads(first.out)["job_id"]
    wait_until(lambda: run.exists() and furthest_step(run) >= 3, "the first steps", 240)
    assert state(job_id) == "RUNNING"
    cancelled = dure("cancel", job_id, *to, "--json")
    assert json.loads(cancelled.out)["how"] == "saves", cancelled.err
    wait_until(lambda: state(job_id) == "FAILED", "the job's end", 240)  # 75, as Ray sees it
    logs = dure("logs", job_id, *to)
    assert "resumable" in logs.out

    set_pace(tmp_path, 0.0)
    again = json.loads(dure(*submit).out)["job_id"]
    followed = dure("logs", again, *to, "--follow")
    assert "goes on from step" in followed.out, followed.err
    wait_until(lambda: state(again) == "SUCCEEDED", "the end of the run", 240)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["weights_sha256"] == train_alone(job, tmp_path / "alone").weights_sha256
    refused = dure("cancel", again, *to)
    assert (refused.code, refused.err.count("\n")) == (2, 1)
