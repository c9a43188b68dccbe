"""`dure submit` on a real Slurm: the script's decisions, and the same bits through requeues and signals."""

import json
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support import FOLDER
from support.alone import train_alone
from support.commands import EXAMPLES, dure

from dure.base.errors import UsageError
from dure.base.run_folder import RunFolder
from dure.engine.slurm import queue
from dure.engine.slurm.cancel import cancel
from dure.engine.slurm.request import Request
from dure.engine.slurm.status import all_of_mine, find, in_words, progress_of, status_of
from dure.engine.slurm.submit import submit, submitted_from

JOB = f"""
name = "tiny"
storage = "shared"
[model]
factory = "{EXAMPLES}/tiny_transformer.py:model"
args = {{ width = 48, layers = 2, heads = 4, dropout = 0.1 }}
[data]
factory = "{FOLDER}/slow_data.py:counting"
args = {{ seed = 1, sequences = 1003 }}
global_batch = 64
[train]
loss = "{EXAMPLES}/tiny_transformer.py:token_loss"
lr = 4e-3
epochs = 2
seed = 42
clip_norm = 1.0
[team]
ranks = 2
[checkpoint]
every_steps = 5
[cluster]
nodes = 2
"""


@pytest.fixture
def here(slurm, monkeypatch):
    """This process speaks to the test's Slurm."""
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    return slurm


def request_for(agent, folder, **changes):
    """A job whose agents run a piece of Python, with `run` and `node` defined, in place of `dure train`."""
    head = "import os, signal, sys, time, pathlib\nrun = pathlib.Path(sys.argv[sys.argv.index('--run-dir') + 1])\n"
    head += "node = int(sys.argv[sys.argv.index('--node-rank') + 1])\n"
    made = Request(
        name="standin",
        train=(sys.executable, "-c", head + agent),
        runs=folder / "checkpoints",
        run=None,
        work=folder,
        nodes=2,
        min_nodes=2,
        ranks=1,
        cpus_per_node=1,
        requeues=1,
    )
    return replace(made, **changes)


def ended(slurm, submitted):
    """How a job ended, with what it printed."""
    job = slurm.wait(submitted.job_id, 500)
    return job, submitted.log.read_text()


SAVES_WHEN_ASKED = """
deadline = time.monotonic() + 500
(run / f'up-{node}').touch()
while not (run / 'stop').exists() and time.monotonic() < deadline: time.sleep(0.05)
sys.exit(75)
"""


def test_what_ends_a_job_and_what_queues_it_again(here, tmp_path):
    """Five jobs at once, because a requeued job waits some seconds before it starts again."""
    # Its first attempt loses an agent as a machine without memory does; its second stops early, and that was the last.
    twice = submit(
        request_for(
            "if node == 1 and 'SLURM_RESTART_COUNT' not in os.environ: os.kill(os.getpid(), signal.SIGKILL)\n"
            "sys.exit(75)",
            tmp_path,
        )
    )
    wrong = submit(request_for("sys.exit(1 + node)", tmp_path))
    asked = submit(request_for(SAVES_WHEN_ASKED, tmp_path))
    signalled = submit(
        request_for(f"if 'SLURM_RESTART_COUNT' in os.environ: sys.exit(0)\n{SAVES_WHEN_ASKED}", tmp_path)
    )
    killed = submit(request_for(SAVES_WHEN_ASKED, tmp_path))
    for waiting in (asked, signalled, killed):
        up = [waiting.run / f"up-{node}" for node in (0, 1)]
        slurm_waits(lambda up=up: all(path.exists() for path in up), waiting)
    assert {status.job_id for status in all_of_mine()} >= {asked.job_id, signalled.job_id}
    assert cancel(find(str(asked.run)), now=False).how == "saves"
    assert cancel(find(str(killed.job_id)), now=True).how == "killed"
    # What Slurm sends before the time limit, sent now.
    queue.send(signalled.job_id, "USR1")

    job, log = ended(here, wrong)
    assert (job.state, job.exit_code, job.restarts) == ("FAILED", 2, 0), log

    job, log = ended(here, asked)
    assert (job.state, job.exit_code, job.restarts) == ("FAILED", 75, 0), log
    assert f"dure submit with --run-dir {asked.run} goes on" in log

    job, log = ended(here, signalled)
    assert (job.state, job.exit_code, job.restarts) == ("COMPLETED", 0, 1), log
    assert "ended with 75: queued again, 1 of at most 1 times" in log
    assert not (signalled.run / "stop").exists()

    # The script is told by Slurm that it ends, and must not bring back what its user wanted gone.
    job, log = ended(here, killed)
    assert (job.state, job.restarts) == ("CANCELLED", 0), log

    job, log = ended(here, twice)
    assert (job.state, job.exit_code, job.restarts) == ("FAILED", 75, 1), log
    assert "ended with 137: queued again, 1 of at most 1 times" in log
    assert "ended with 75: stopped, and resumable (queued again 1 of 1 times)" in log
    told = status_of(find(str(twice.job_id)))
    assert (told.requeued, told.exit_code) == (1, 75)
    assert "stopped, resumable (75) on node[0-1]" in in_words([told])
    with pytest.raises(UsageError, match="is over already"):
        cancel(find(str(twice.job_id)), now=False)


def slurm_waits(reached, submitted, deadline_seconds=400):
    """Wait for something that a job does."""
    deadline = time.monotonic() + deadline_seconds
    while not reached():
        assert time.monotonic() < deadline, submitted.log.read_text() if submitted.log.exists() else submitted
        time.sleep(0.05)


def test_slurm_takes_hostile_paths_as_they_are(here, tmp_path):
    """Log, run and working folder of such names; the agents write where they are."""
    names = ["a b", 'it\'s "quoted" $(touch pwned) `id`', "# 100% %j", "한글", "-x;&|<>*?", "\x85"]
    jobs = {}
    for name in names:
        folder = tmp_path / name
        folder.mkdir()
        where = "(run / f'cwd-{node}').write_text(os.getcwd())"
        jobs[folder] = submit(request_for(where, tmp_path, run=folder, work=folder))
        assert find(str(jobs[folder].job_id)).run == jobs[folder].run == folder
    for folder, submitted in jobs.items():
        job, log = ended(here, submitted)
        assert (job.state, job.exit_code) == ("COMPLETED", 0), log
        assert [(folder / f"cwd-{node}").read_text() for node in (0, 1)] == [str(folder)] * 2
    assert [path for path in tmp_path.rglob("pwned") if path.is_file()] == []


def test_two_jobs_cannot_have_one_run(here, tmp_path):
    made = request_for("", tmp_path, run=tmp_path / "run", options=("--hold",))
    first = submit(made)
    with pytest.raises(
        UsageError, match=f"job {first.job_id}, which is PENDING; two jobs cannot have one run"
    ):
        submit(made)
    assert status_of(find(str(first.run))).progress is None
    assert cancel(find(str(first.run)), now=False).how == "dequeued"
    assert here.wait(first.job_id, 240).state == "CANCELLED"
    assert cancel(find(str(submit(made).run)), now=True).how == "dequeued"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights of the job on one rank, without Slurm."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "job.toml").write_text(JOB)
    return train_alone(folder / "job.toml", folder / "run").weights_sha256


def step_of(run):
    """How far the run is by its own events."""
    progress = progress_of(RunFolder(run))
    return progress.step if progress else 0


def submitted_job(tmp_path, *options, **environment):
    (tmp_path / "job.toml").write_text(JOB)
    made = dure("submit", tmp_path / "job.toml", "--json", *options, cwd=tmp_path, **environment)
    assert made.code == 0, made.err
    submitted = submitted_from(Path(json.loads(made.out)["run"]))
    assert submitted is not None
    return submitted


@pytest.mark.parametrize("requeues", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_signalled_and_requeued_on_two_nodes_the_weights_are_the_same_bits(
    here, tmp_path, undisturbed, requeues
):
    """Signalled, it saves and is queued again; in `make soak` an operator requeues it before that."""
    # Slow until it has been queued again so often, and fast then: it cannot come to its end before it is signalled.
    submitted = submitted_job(tmp_path, SLOW_SAMPLES=",".join(["0.05"] * requeues + ["0"]))
    if requeues == 2:
        slurm_waits(lambda: step_of(submitted.run) >= 6, submitted)
        assert here.command("scontrol", "requeue", str(submitted.job_id)).returncode == 0
        here.wait(submitted.job_id, 240, frozenset({"PENDING"}))
        here.wait(submitted.job_id, 240, frozenset({"RUNNING"}))
    slurm_waits(lambda: step_of(submitted.run) >= 5 * (requeues - 1) + 3, submitted)
    queue.send(submitted.job_id, "USR1")
    job, log = ended(here, submitted)
    assert (job.state, job.exit_code, job.restarts) == ("COMPLETED", 0, requeues), log
    assert log.count("goes on from step") >= requeues, log
    (told,) = json.loads(dure("status", submitted.run, "--json").out)["jobs"]
    assert (told["state"], told["requeued"], told["log"]) == ("COMPLETED", requeues, str(submitted.log))
    assert (told["progress"]["step"], told["progress"]["done"]) == (32, True)
    assert told["progress"]["weights_sha256"] == undisturbed
    summary = json.loads((submitted.run / "summary.json").read_text())
    assert (summary["ranks"], summary["weights_sha256"]) == (4, undisturbed)
    assert summary["ledger"]["exactly_once"]


@pytest.mark.soak
def test_time_limits_in_the_middle_leave_the_bits_as_they_are(here, tmp_path, undisturbed):
    """A minute at a time, and Slurm's own signal: it may come up to half a minute early."""
    submitted = submitted_job(
        tmp_path, "--set", "slurm.time=1", "--set", "slurm.signal_seconds=30", SLOW_SAMPLES="0.08"
    )
    job = here.wait(submitted.job_id, 380)
    log = submitted.log.read_text()
    assert (job.state, job.exit_code) == ("COMPLETED", 0), log
    assert job.restarts == log.count("dure: the time is nearly over") >= 1, log
    summary = json.loads((submitted.run / "summary.json").read_text())
    assert summary["weights_sha256"] == undisturbed


@pytest.mark.soak
def test_in_the_jobs_image_on_every_node_the_weights_are_the_same_bits(here, tmp_path, image, undisturbed):
    shutil.copy(EXAMPLES / "tiny_transformer.py", tmp_path)
    job = JOB.replace(f"{EXAMPLES}/", "").replace(f"{FOLDER}/slow_data.py", "tiny_transformer.py")
    (tmp_path / "job.toml").write_text(f'{job}image = "{image}"\nrunner = "bubblewrap"\n')
    made = dure("submit", tmp_path / "job.toml", "--json", cwd=tmp_path)
    assert made.code == 0, made.err
    submitted = submitted_from(Path(json.loads(made.out)["run"]))
    assert submitted is not None
    slurm_waits(lambda: step_of(submitted.run) >= 1, submitted, 200)
    queue.send(submitted.job_id, "USR1")
    job, log = ended(here, submitted)
    assert (job.state, job.exit_code) == ("COMPLETED", 0), log
    assert job.restarts == log.count("ended with 75: queued again") == 1, log
    assert json.loads((submitted.run / "summary.json").read_text())["weights_sha256"] == undisturbed


@pytest.mark.soak
def test_a_time_limit_that_comes_before_the_save_queues_the_job_again(here, tmp_path):
    never_saves = "if 'SLURM_RESTART_COUNT' in os.environ: sys.exit(0)\ntime.sleep(280)"
    submitted = submit(request_for(never_saves, tmp_path, time="1", signal_seconds=20))
    job, log = ended(here, submitted)
    assert (job.state, job.exit_code, job.restarts) == ("COMPLETED", 0, 1), log
    assert "the time was over before the run had saved: queued again, 1 of at most 1 times" in log


def test_without_slurm_submit_says_what_is_missing_and_a_dry_run_needs_nothing(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    before = sorted(tmp_path.rglob("*"))
    bare = {"PATH": str(tmp_path)}
    shown = dure("submit", tmp_path / "job.toml", "--dry-run", cwd=tmp_path, **bare)
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.startswith("#!/bin/bash\n")
    assert f"#SBATCH --output={tmp_path}/shared/checkpoints/slurm/tiny-%j.log" in shown.out
    refused = dure("submit", tmp_path / "job.toml", cwd=tmp_path, **bare)
    assert (refused.code, refused.out) == (2, "")
    assert "there is no sbatch here" in refused.err
    assert dure("status", cwd=tmp_path, **bare).code == 2
    assert sorted(tmp_path.rglob("*")) == before
