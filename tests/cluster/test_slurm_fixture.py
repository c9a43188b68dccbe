"""The test cluster is a Slurm like any other (steps, batch jobs, signals, requeue), and leaves no trace."""

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support import FOLDER
from support.leftovers import all_gone, wait_until
from support.processes import find
from support.slurm import SlurmCluster, SlurmError, why_not_here

SHOW = "env | grep ^SLURM"


def name_of(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def variables(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def test_tasks_of_a_step_see_their_place_in_it(slurm):
    done = slurm.srun(
        ["bash", "-c", SHOW], 4, 2, options=["--label", "--ntasks-per-node=2"], deadline_seconds=240
    )
    assert done.returncode == 0, done.stderr
    tasks: dict[int, dict[str, str]] = {rank: {} for rank in range(4)}
    for line in done.stdout.splitlines():
        rank, _, assignment = line.partition(": ")
        tasks[int(rank)] |= variables(assignment)
    for rank, seen in tasks.items():
        assert seen["SLURM_PROCID"] == str(rank)
        assert seen["SLURM_NODEID"] == str(rank // 2)
        assert seen["SLURM_LOCALID"] == str(rank % 2)
        assert seen["SLURMD_NODENAME"] == f"node{rank // 2}"
        assert seen["SLURM_STEP_NUM_TASKS"] == seen["SLURM_NTASKS"] == "4"
        assert seen["SLURM_STEP_NUM_NODES"] == "2"
        assert seen["SLURM_STEP_NODELIST"] == "node[0-1]"
        assert seen["SLURM_STEP_TASKS_PER_NODE"] == "2(x2)"
        assert seen["SLURM_STEP_ID"] == "0"
        assert seen["SLURM_JOB_ID"] == tasks[0]["SLURM_JOB_ID"]


def test_a_node_has_a_host_name_that_every_task_can_resolve(slurm):
    code = (
        "import socket as s; print(s.gethostname(), s.getfqdn(), *map(s.gethostbyname, ['node0', 'node1']))"
    )
    done = slurm.srun([sys.executable, "-c", code], 2, 2)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "node0 node0 127.0.0.1 127.0.0.1",
        "node1 node1 127.0.0.1 127.0.0.1",
    ]


def test_a_batch_script_outside_srun_sees_no_step(slurm):
    job_id = slurm.sbatch(f"#!/bin/bash\n{SHOW}\n", "--nodes=2", "--ntasks=4")
    job = slurm.wait(job_id, 240)
    assert (job.state, job.exit_code, job.restarts) == ("COMPLETED", 0, 0)
    seen = variables(slurm.output(job_id))
    # The trap: a batch script has a task's number and the job's task count, yet it is one process.
    assert seen["SLURM_PROCID"] == "0"
    assert seen["SLURM_NTASKS"] == "4"
    assert seen["SLURM_JOB_ID"] == str(job_id)
    assert not [name for name in seen if name.startswith("SLURM_STEP")]


def test_a_failing_job_keeps_its_exit_code(slurm):
    job = slurm.wait(slurm.sbatch("#!/bin/bash\nexit 75\n"), 240)
    assert (job.state, job.exit_code, job.signal) == ("FAILED", 75, 0)


@pytest.mark.soak
def test_a_signal_reaches_the_batch_script_and_the_job_is_requeued(slurm):
    """By this Slurm alone; test_slurm_submit has it signal and requeue the product's script."""
    script = """#!/bin/bash
trap 'echo signalled; scontrol requeue $SLURM_JOB_ID; exit 0' USR1
echo "attempt ${SLURM_RESTART_COUNT:-0}"
[ -n "$SLURM_RESTART_COUNT" ] && exit 0
while true; do sleep 0.1; done
"""
    job_id = slurm.sbatch(script, "--requeue")
    slurm.wait(job_id, 240, frozenset({"RUNNING"}))
    slurm.wait_for_output(job_id, "attempt 0", 240)
    done = slurm.command("scancel", "--batch", "--signal=USR1", str(job_id))
    assert done.returncode == 0, done.stderr
    job = slurm.wait(job_id, 240)
    assert (job.state, job.restarts) == ("COMPLETED", 1)
    assert [
        line for line in slurm.output(job_id).splitlines() if line.startswith(("attempt", "signalled"))
    ] == [
        "attempt 0",
        "signalled",
        "attempt 1",
    ]


def test_a_wait_that_is_too_short_says_what_the_job_and_the_daemons_were_doing(slurm):
    job_id = slurm.sbatch("#!/bin/bash\necho still here\nsleep 600\n")
    slurm.wait_for_output(job_id, "still here", 240)
    with pytest.raises(SlurmError, match=r"(?s)RUNNING.*still here.*slurmctld.log"):
        slurm.wait(job_id, 0.1)
    assert slurm.command("scancel", str(job_id)).returncode == 0
    assert slurm.wait(job_id, 240).state == "CANCELLED"


def test_a_step_past_its_deadline_is_ended_and_reported(slurm):
    with pytest.raises(SlurmError, match="did not end in 2 s"):
        slurm.srun(["sh", "-c", "echo begun; sleep 321"], 1, 1, deadline_seconds=2)
    running = ("squeue", "--noheader", "--states=RUNNING")
    wait_until(lambda: slurm.command(*running).stdout == "", "the end of the step")


def test_a_cluster_leaves_no_process_and_no_file():
    if reason := why_not_here():
        pytest.skip(f"Slurm: {reason}")
    # A task that ignores SIGTERM, with a child that left its session and forgot its environment.
    stubborn = "#!/bin/bash\ntrap '' TERM\nsetsid env -i sleep 654 &\necho $!\nsleep 654\n"
    with SlurmCluster() as cluster:
        job_id = cluster.sbatch(stubborn, "--nodes=2")
        cluster.wait_for_output(job_id, "\n", 240)
        child = psutil.Process(int(cluster.output(job_id)))
        processes = cluster.processes()
        assert child in processes
        assert "slurmstepd" in {name_of(process) for process in processes}
    all_gone(processes)
    assert cluster.processes() == []
    assert not cluster.folder.exists()
    # Others use /dev/shm meanwhile: look for names that could come from these daemons.
    assert [path for path in Path("/dev/shm").iterdir() if re.search("slurm|munge|node[01]", path.name)] == []


def test_a_killed_test_run_takes_the_daemons_along():
    if reason := why_not_here():
        pytest.skip(f"Slurm: {reason}")
    code = """
import time
from support.slurm import SlurmCluster
with SlurmCluster() as cluster:
    print(cluster.environment["SLURM_CONF"], flush=True)
    time.sleep(600)
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=FOLDER.parent,
        stdout=subprocess.PIPE,
        text=True,
        env=SlurmCluster.outside_environment(),
    )
    try:
        assert owner.stdout is not None
        configuration = owner.stdout.readline().strip()
        daemons = find(lambda process: process.environ().get("SLURM_CONF") == configuration)
        assert {"munged", "slurmctld", "slurmd"} <= {name_of(daemon) for daemon in daemons}
        assert len(daemons) >= 4
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.communicate()
    all_gone(daemons)
    shutil.rmtree(Path(configuration).parent)
