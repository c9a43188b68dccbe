"""A node of a real Slurm is lost for good in the middle of a job: the job goes on by itself, to the same bits."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.leftovers import all_gone
from support.processes import find, kill_with_children
from support.slurm import SlurmCluster, why_not_here
from test_slurm_submit import JOB, slurm_waits, step_of, undisturbed  # noqa: F401

from dure.config import load_job, parse_settings
from dure.engine.slurm.prepare import prepare
from dure.engine.slurm.submit import submit


@pytest.fixture
def own_slurm(monkeypatch):
    """A Slurm for one test, which may break it."""
    if reason := why_not_here():
        pytest.skip(f"Slurm: {reason}")
    with SlurmCluster() as cluster:
        monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        yield cluster


def lose(cluster, name):
    """Kill all that runs on a node at once: its slurmd, the step's manager, the agent and its ranks."""
    here = Path(f"/proc/{cluster.daemon(name).pid}/ns/uts").stat().st_ino
    lost = find(lambda process: Path(f"/proc/{process.pid}/ns/uts").stat().st_ino == here)
    assert {"slurmd", "slurmstepd"} <= {process.name() for process in lost}
    kill_with_children(lost)
    cluster.daemon(name).wait(30)
    all_gone(lost)


def submitted_job(tmp_path, monkeypatch, *settings):
    """The job in the queue, with less patience than it would have: it is known here when a node is lost."""
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    monkeypatch.setenv("SLOW_SAMPLES", "0.01")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    loaded = load_job(job, parse_settings(settings))
    submitted = submit(replace(prepare(loaded, job, settings, None, None), wait_seconds=5))
    slurm_waits(lambda: step_of(submitted.run) >= 8, submitted)
    return submitted


@pytest.mark.soak
@pytest.mark.parametrize("name", ["node1", "node0"])
def test_a_lost_node_costs_a_requeue_and_no_bits(own_slurm, tmp_path, monkeypatch, undisturbed, name):  # noqa: F811
    """node1 is noticed by the leader, and the script queues the job again; node0 takes the script along, and Slurm
    queues it again when it has missed the node for a minute."""
    submitted = submitted_job(tmp_path, monkeypatch)
    lose(own_slurm, name)
    own_slurm.wait(submitted.job_id, 200, frozenset({"PENDING"}))
    own_slurm.start_node(name)
    ended = own_slurm.wait(submitted.job_id, 300)
    log = submitted.log.read_text()
    assert (ended.state, ended.exit_code, ended.restarts) == ("COMPLETED", 0, 1), log
    summary = json.loads((submitted.run / "summary.json").read_text())
    assert (summary["ranks"], summary["weights_sha256"]) == (4, undisturbed), log
    if name == "node1":
        assert "ended with 75: queued again, 1 of at most 10 times" in log


@pytest.mark.soak
def test_with_fewer_nodes_allowed_the_job_goes_on_without_the_lost_one(
    own_slurm,
    tmp_path,
    monkeypatch,
    undisturbed,  # noqa: F811
):
    submitted = submitted_job(tmp_path, monkeypatch, "cluster.min_nodes=1")
    lose(own_slurm, "node1")
    ended = own_slurm.wait(submitted.job_id, 400)
    log = submitted.log.read_text()
    assert (ended.state, ended.exit_code, ended.restarts) == ("COMPLETED", 0, 0), log
    summary = json.loads((submitted.run / "summary.json").read_text())
    assert (summary["ranks"], summary["weights_sha256"]) == (2, undisturbed), log
