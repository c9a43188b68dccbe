"""What runs in the pods, as processes with a pod's variables on this machine: no cluster, but the agents are real."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from support.alone import train_alone
from support.leftovers import wait_until
from support.nodes_stories import furthest_step, put_job, set_pace

from dure.base.team_key import make_key_file
from dure.tools.bench.ports import free_ports

STEPS = 150


class Pod:
    """A pod's first process. Killing it kills its ranks, as the end of a pod does."""

    def __init__(self, index, job, run, port, key, folder):
        self.err = folder / f"pod-{index}-{time.monotonic_ns()}.err"
        command = [
            "pod",
            job,
            "--nodes=2",
            f"--run-dir={run}",
            f"--leader=127.0.0.1:{port}",
            f"--team-key={key}",
        ]
        with self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dure", *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=err,
                env={**os.environ, "JOB_COMPLETION_INDEX": str(index), "POD_IP": "127.0.0.1"},
            )

    @property
    def said(self):
        return self.err.read_text(errors="replace")

    def ends(self):
        self.process.wait(240)
        return self.process.returncode


@pytest.fixture
def pods(tmp_path):
    storage = tmp_path / "storage"
    storage.mkdir()
    job, run = put_job(storage, STEPS, 0.02), storage / "checkpoints" / "pods"
    make_key_file(tmp_path / "team.key")
    os.chmod(tmp_path / "team.key", 0o440)  # as Kubernetes mounts it
    (port,) = free_ports(1)
    started = []

    def start():
        started.extend(Pod(index, job, run, port, tmp_path / "team.key", tmp_path) for index in (0, 1))
        return started[-2:]

    yield start, run, storage
    for pod in started:
        pod.process.kill()
        pod.process.wait(60)


def wait_for(run, step, pods):
    def there():
        for pod in pods:
            assert pod.process.poll() is None, pod.said
        return run.exists() and furthest_step(run) >= step

    wait_until(there, f"step {step}", 240)


def test_a_pod_is_killed_one_is_asked_to_end_and_the_same_indices_come_to_the_same_bits(pods, tmp_path):
    start, run, storage = pods
    first = start()
    wait_for(run, 10, first)
    first[1].process.kill()
    assert first[0].ends() == 75, "the other one saves, and Kubernetes starts both again"
    assert "node 1" in first[0].said

    second = start()
    wait_for(run, furthest_step(run) + 10, second)
    hook = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "import sys; from pathlib import Path; from dure.engine.kubernetes.pod import save_and_wait\n"
            f"save_and_wait(Path(sys.argv[1]), {second[1].process.pid})",
            run,
        ]
    )
    assert [pod.ends() for pod in second] == [75, 75]
    assert hook.wait(60) == 0

    set_pace(storage, 0.0)
    third = start()
    assert [pod.ends() for pod in third] == [0, 0], third[0].said
    assert "goes on from step" in third[0].said
    summary = json.loads((run / "summary.json").read_text())
    alone = train_alone(storage / "steady.toml", tmp_path / "alone")
    assert summary["weights_sha256"] == alone.weights_sha256


def test_a_pod_that_is_ended_by_sigterm_has_the_run_saved(pods):
    start, run, _ = pods
    both = start()
    wait_for(run, 5, both)
    both[1].process.send_signal(signal.SIGTERM)
    assert [pod.ends() for pod in both] == [75, 75]
