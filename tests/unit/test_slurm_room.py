"""What `dure submit`, `status` and `cancel` make of a job, of Slurm's answers and of a run's events."""

import json
from hashlib import sha256
from pathlib import Path

import pytest
from support.commands import EXAMPLES, dure

from dure.base.errors import UsageError
from dure.base.run_folder import RunFolder
from dure.config import load_job
from dure.engine.progress import Progress, progress_of
from dure.engine.slurm import queue
from dure.engine.slurm.allocation import salloc_words
from dure.engine.slurm.prepare import prepare
from dure.engine.slurm.queue import _APART, _read, run_in
from dure.engine.slurm.script import script
from dure.engine.slurm.status import find
from dure.engine.slurm.submit import submitted_from
from dure.observe.events import Stepped, TeamFormed, encode

JOB = EXAMPLES / "tiny_transformer.toml"
IMAGE = b"hsqs, as squashfs begins, and more"


def asked(tmp_path, **settings):
    """What the example asks of Slurm, with these settings."""
    values = {name.replace("__", "."): value for name, value in settings.items()}
    return prepare(load_job(JOB, values), JOB, [], None, tmp_path / "run")


def test_the_job_says_what_is_asked_for(tmp_path):
    request = asked(
        tmp_path,
        cluster__nodes="2", cluster__min_nodes="1", team__ranks="4", slurm__cpus_per_rank="3", slurm__time="90",
        slurm__gpus_per_node="4",
    )  # fmt: skip
    assert (request.nodes, request.min_nodes, request.cpus_per_node, request.gpus_per_node) == (2, 1, 12, 4)
    assert (request.time, request.resumable, request.run) == ("90", True, tmp_path / "run")
    assert request.log(7) == tmp_path / "run" / "slurm" / "tiny_transformer-7.log"


def test_without_a_run_folder_each_job_has_one_of_its_own(tmp_path):
    request = prepare(load_job(JOB, {"storage": str(tmp_path)}), JOB, ["train.lr=0.1"], 3, None)
    assert request.run_of(7) == tmp_path / "checkpoints" / "tiny_transformer-7"
    assert request.log(7) == tmp_path / "checkpoints" / "slurm" / "tiny_transformer-7.log"
    assert request.train[1:] == ("-m", "dure", "train", str(JOB), "--set=train.lr=0.1", "--ranks=3")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"slurm__time": "'soon'"}, "slurm.time is 'soon'"),
        ({"slurm__time": "2"}, "signal_seconds is 120, and slurm.time, 2, is 120 s"),
        ({"slurm__options": "['--nodes=3']"}, "set cluster.nodes"),
    ],
)
def test_what_slurm_could_not_do_is_refused_in_the_jobs_words(tmp_path, settings, words):
    with pytest.raises(UsageError, match=words):
        asked(tmp_path, **settings)


def test_a_bucket_is_no_place_for_a_runs_files():
    with pytest.raises(UsageError, match="give one with --run-dir"):
        prepare(load_job(JOB, {"storage": "s3://bucket/x"}), JOB, [], None, None)


def test_a_run_that_saves_nothing_is_never_queued_again(tmp_path):
    assert not asked(tmp_path, checkpoint__every_seconds="0").resumable
    assert not asked(tmp_path, team__sync="false").resumable


def test_a_dry_run_prints_the_script_as_json_too(tmp_path):
    shown = dure("submit", JOB, "--dry-run", "--json", "--run-dir", tmp_path / "run", PATH=str(tmp_path))
    assert shown.summary["script"].startswith("#!/bin/bash\n")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def with_image(tmp_path):
    """Settings of a job that has an image and a storage."""
    (tmp_path / "i.sqsh").write_bytes(IMAGE)
    return {"storage": str(tmp_path), "cluster.image": "i.sqsh"}


def test_an_image_that_slurm_runs_is_told_to_srun_with_the_runs_own_folder(with_image, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    request = prepare(load_job(JOB, {**with_image, "cluster.runner": "pyxis"}), JOB, [], None, None)
    run = f"{tmp_path}/checkpoints/tiny_transformer-\0job\0"
    options = dict(option.partition("=")[::2] for option in request.srun_options)
    assert options["--container-image"] == f"{tmp_path}/i.sqsh"
    assert set(options["--container-mounts"].split(",")) == {
        f"{tmp_path}:{tmp_path}:ro", f"{JOB.parent}:{JOB.parent}:ro", f"{run}:{run}:rw"
    }  # fmt: skip
    assert f"DURE_IMAGE={sha256(IMAGE).hexdigest()}" in options["--export"]
    assert request.train[0] == "/opt/dure/bin/python"
    assert f'{tmp_path}/checkpoints/tiny_transformer-"$job":{tmp_path}' in script(request)


@pytest.mark.parametrize(
    ("srun", "by_slurm"),
    [
        ("echo '  --container-image=PATH'", True),
        ("echo no more", False),
        ("exec /bin/sleep 600", False),
        (None, False),
    ],
    ids=["with pyxis", "without", "hangs", "not there"],
)
def test_auto_leaves_the_image_to_slurm_where_srun_has_pyxis(
    with_image, tmp_path, monkeypatch, srun, by_slurm
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr("dure.engine.slurm.queue.ANSWER_SECONDS", 20.0 if by_slurm else 1.0)
    (tmp_path / "bin").mkdir()
    if srun is not None:
        (tmp_path / "bin" / "srun").write_text(f"#!/bin/sh\n{srun}\n")
        (tmp_path / "bin" / "srun").chmod(0o755)
    request = prepare(load_job(JOB, with_image), JOB, [], None, None)
    assert bool(request.srun_options) == by_slurm


@pytest.mark.parametrize("runner", ["enroot", "apptainer", "bubblewrap"])
def test_into_any_other_image_each_node_goes_by_itself(with_image, runner):
    inside = prepare(load_job(JOB, {**with_image, "cluster.runner": runner}), JOB, [], None, None)
    outside = prepare(load_job(JOB, {"storage": with_image["storage"]}), JOB, [], None, None)
    assert inside == outside


def test_nodes_for_a_look_are_asked_for_as_the_batch_script_does_but_now_and_for_minutes(tmp_path):
    request = asked(
        tmp_path,
        cluster__nodes="2", team__ranks="4", slurm__partition="'train'", slurm__account="'a b'", slurm__time="90",
        slurm__gpus_per_node="4",
        slurm__options="['--constraint=g5', '--mail-type=END', '--dep=singleton', '-b now', '-x n1', '--exclusive']",
    )  # fmt: skip
    assert salloc_words(request, "dure-1", 61)[:-3] == [
        *("salloc", "--quiet", "--no-bell", "--job-name=dure-1", "--immediate=61", "--time=12", "--nodes=2"),
        *("--ntasks-per-node=1", "--cpus-per-task=4", "--gres=gpu:4", "--partition=train", "--account=a b"),
        *("--constraint=g5", "-x n1", "--exclusive"),
    ]
    elastic = salloc_words(asked(tmp_path, cluster__nodes="2", cluster__min_nodes="1"), "dure-1", 60)
    assert "--nodes=1-2" in elastic
    assert "--ntasks-per-node=1" not in elastic


def test_slurms_answer_is_read():
    line = _APART.join(
        ["7", "cats | x", "RUNNING", "None", "2", "node[0-1]", "1:02", "2:00:00", "dure runs=/a b/cats-"]
    )
    job = _read(line)
    assert (job.id, job.name, job.state, job.nodes, job.run) == (
        7,
        "cats | x",
        "RUNNING",
        2,
        Path("/a b/cats-7"),
    )
    assert run_in("dure run=/x-%j", 7) == Path("/x-%j")
    assert run_in("(null)", 7) is None


def test_a_command_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"there is no squeue here.*--dry-run"):
        queue.jobs()


def test_a_folder_that_was_never_submitted_is_told_apart_from_a_job(tmp_path):
    with pytest.raises(UsageError, match="neither a job's number nor the folder"):
        find(str(tmp_path))
    (tmp_path / "submit.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be read"):
        submitted_from(tmp_path)


def step(at):
    return Stepped(0, at, 1.0 / (at + 1), 8, 8, {}, 0.1, None, tuple(range(200)), "0")


def team(start=0, session=0):
    return TeamFormed(0, 4, 8, 1, "cpu", "node0", 1, True, "r", 10, 100, 2000, session, start)


def recorded(tmp_path, *events, tail=""):
    folder = RunFolder(tmp_path)
    folder.create()
    folder.events(0).write_text("".join(encode(event, 0.0) for event in events) + tail)
    return folder


def test_progress_is_read_from_the_ends_of_a_long_file(tmp_path):
    folder = recorded(tmp_path, team(), *map(step, range(1500)), tail='{"v": 1, "kind": "st')
    assert folder.events(0).stat().st_size > 1 << 20
    assert progress_of(folder) == Progress(1500, 2000, 1.0 / 1500, False, None)


def test_a_session_that_goes_on_counts_from_its_start(tmp_path):
    folder = recorded(tmp_path, team(), *map(step, range(30)), team(20, 1))
    progress = progress_of(folder)
    assert progress is not None
    assert progress.step == 20
    assert progress_of(RunFolder(tmp_path / "nowhere")) is None


def test_a_run_is_done_when_it_has_a_summary(tmp_path):
    folder = recorded(tmp_path, team(), step(1999))
    assert not progress_of(folder).done
    folder.summary.write_text(json.dumps({"weights_sha256": "ab"}))
    assert progress_of(folder) == Progress(2000, 2000, 1.0 / 2000, True, "ab")
