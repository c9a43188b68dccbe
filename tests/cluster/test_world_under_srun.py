"""The world as real tasks of a real Slurm read it."""

import json
import shlex
import sys
from pathlib import Path

import pytest
from support import FOLDER

from dure.base.slurm_lists import expand_hosts

SOURCE = Path(__file__).parents[2] / "src"
TASK = [sys.executable, str(FOLDER / "world_task.py")]
ENVIRONMENT = {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}


def answers(output: str) -> list[dict]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def run(slurm, ntasks, nodes, *options, extra=None, words=()):
    done = slurm.srun(
        [*TASK, *words], ntasks, nodes, options=options, environment={**ENVIRONMENT, **(extra or {})}
    )
    assert done.returncode == 0, done.stderr
    return sorted(answers(done.stdout), key=lambda answer: answer.get("rank", 0))


def places(worlds):
    return [(w["rank"], w["node"], w["local_rank"], w["local_size"]) for w in worlds]


def test_four_tasks_on_two_nodes_know_their_places_and_meet(slurm):
    worlds = run(slurm, 4, 2, "--ntasks-per-node=2", words=["meet"])
    assert places(worlds) == [(0, 0, 0, 2), (1, 0, 1, 2), (2, 1, 0, 2), (3, 1, 1, 2)]
    assert [topology["host"] for topology in worlds] == ["node0", "node0", "node1", "node1"]
    assert [topology["met"] for topology in worlds] == [[1, 2, 3], [0], [0], [0]]
    for topology in worlds:
        assert (topology["size"], topology["nodes"], topology["leader_host"]) == (4, 2, "node0")
        assert (topology["launcher"], topology["run_id"]) == ("srun", worlds[0]["run_id"])
        assert not topology["torch"]


def test_nodes_of_different_sizes(slurm):
    assert places(run(slurm, 4, 2)) == [(0, 0, 0, 3), (1, 0, 1, 3), (2, 0, 2, 3), (3, 1, 0, 1)]


def test_ranks_dealt_out_to_nodes_by_turns(slurm):
    worlds = run(slurm, 4, 2, "--ntasks-per-node=2", "--distribution=cyclic", words=["meet"])
    assert places(worlds) == [(0, 0, 0, 2), (1, 1, 0, 2), (2, 0, 1, 2), (3, 1, 1, 2)]
    assert worlds[0]["met"] == [1, 2, 3]


def test_a_job_of_unlike_parts_is_one_world(slurm):
    parts = ["srun", "--nodes=1", "--ntasks=1", *TASK, "meet", ":", "--nodes=1", "--ntasks=2", *TASK, "meet"]
    done = slurm.command(*parts, environment=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    worlds = sorted(answers(done.stdout), key=lambda answer: answer["rank"])
    assert places(worlds) == [(0, 0, 0, 1), (1, 1, 0, 2), (2, 1, 1, 2)]
    assert worlds[0]["met"] == [1, 2]


def test_a_host_file_that_begins_on_another_node(slurm, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("node1\nnode0\nnode0\n")
    placed = {"SLURM_HOSTFILE": str(hosts)}
    refused = run(slurm, 3, 2, "--distribution=arbitrary", extra=placed)
    assert ["set MASTER_ADDR" in answer["error"] for answer in refused] == [True] * 3
    told = {**placed, "MASTER_ADDR": "node1"}
    worlds = run(slurm, 3, 2, "--distribution=arbitrary", extra=told, words=["meet"])
    assert [topology["host"] for topology in worlds] == ["node1", "node0", "node0"]
    assert worlds[0]["met"] == [1, 2]


def test_steps_of_one_batch_job_and_its_script(slurm):
    task = shlex.join(TASK)
    script = f"#!/bin/bash\n{task}\nsrun {task} meet\nsrun --nodes=1 --ntasks=2 {task} meet\n"
    job_id = slurm.sbatch(script, "--nodes=2", "--ntasks-per-node=2", environment=ENVIRONMENT)
    assert slurm.wait(job_id, 400).state == "COMPLETED", slurm.output(job_id)
    script_world, *worlds = answers(slurm.output(job_id))
    assert (script_world["launcher"], script_world["size"]) == ("alone", 1)
    first = [topology for topology in worlds if topology["run_id"] == f"slurm-{job_id}.0"]
    second = [topology for topology in worlds if topology["run_id"] == f"slurm-{job_id}.1"]
    assert sorted(topology["rank"] for topology in first) == [0, 1, 2, 3]
    # The job has two nodes; this step has one of them.
    assert sorted((topology["rank"], topology["nodes"], topology["local_size"]) for topology in second) == [
        (0, 1, 2),
        (1, 1, 2),
    ]
    assert first[0]["leader_port"] != second[0]["leader_port"]


def test_a_job_submitted_from_inside_a_step_does_not_take_that_step_for_its_own(slurm, tmp_path):
    inner = tmp_path / "inner.sh"
    inner.write_text(f"#!/bin/bash\n{shlex.join(TASK)}\n")
    output = tmp_path / "inner.out"
    submit = f"[ $SLURM_PROCID != 3 ] || sbatch --wait --ntasks=1 --output={output} {inner}"
    done = slurm.srun(["bash", "-c", submit], 4, 2, environment=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    (answer,) = answers(output.read_text())
    assert "left over from the step that submitted this job" in answer["error"]


@pytest.mark.parametrize(
    "hosts",
    [
        ["node0", "node1"],
        ["gpu08", "gpu09", "gpu10", "gpu12", "login"],
        ["r1n1", "r1n2", "r2n1", "r2n2"],
        ["a-01b", "a-02b", "z9", "z10"],
    ],
)
def test_node_lists_are_read_as_slurm_itself_reads_them(slurm, hosts):
    compressed = slurm.command("scontrol", "show", "hostlist", ",".join(hosts)).stdout.strip()
    expanded = slurm.command("scontrol", "show", "hostnames", compressed).stdout.split()
    assert expand_hosts(compressed) == expanded
    assert sorted(expanded) == sorted(hosts)
