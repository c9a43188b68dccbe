"""Measuring a job for the planner: short real runs of it, which leave nothing behind."""

import json
from dataclasses import replace

from support.commands import EXAMPLES, dure

from dure.config import load_job
from dure.plan.links import Shape
from dure.plan.measurement import read_measurement
from dure.plan.outlook import Told, assume
from dure.plan.step import step_phases

JOB = EXAMPLES / "three_weights.toml"


def test_a_job_is_measured_once_and_planned_from_then_on(tmp_path):
    before = sorted(path.name for path in EXAMPLES.iterdir())
    path = tmp_path / "measured.json"
    options = ("plan", JOB, "--measured", path, "--nodes", "1,2", "--json")
    first = dure(*options)
    assert first.code == 0, first.err
    assert "measuring one rank" in first.err
    measured, job = read_measurement(path), load_job(JOB, {}).job
    assert (measured.shards, measured.batch) == (job.team.shards, job.data.global_batch)
    assert measured.parameters == 3
    assert measured.state_bytes > 0, "its checkpoint was saved, and not in the job's folders"
    assert measured.rank_bytes > 1 << 20
    assert len(measured.exchange) == 2
    assert measured.crowding >= 1
    assert measured.shard.seconds > 0
    assert sorted(path.name for path in EXAMPLES.iterdir()) == before
    again = dure(*options)
    assert "measuring" not in again.err
    assert json.loads(again.out) == json.loads(first.out)
    # On one rank, the planner says what was measured.
    assumed = assume(job, measured, None, Told())
    phases = step_phases(assumed.work, replace(assumed.team, shape=Shape(1, 1)))
    assert phases.compute == measured.shards * measured.shard.seconds
    assert phases.exchange == 0
