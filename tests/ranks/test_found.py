"""Jobs that once broke the promise give the same bits on 1, 3 and 5 ranks, or are refused before the first step."""

import json
import os
import subprocess
import sys

import pytest
from support.commands import train
from support.found import jobs

from dure.base.run_folder import RunFolder
from dure.launch import run_team
from dure.observe.events import Stepped, read_events


def on_ranks(ranks, names, folder):
    folder.mkdir(exist_ok=True)
    texts = [(name, jobs.job_text(folder, jobs.JOBS[name], ranks)) for name in names]
    for at in range(len(texts)):
        RunFolder(folder / str(at)).create()
    if ranks == 1:
        return [jobs.train_each(texts, folder)]
    return run_team(
        "support.found.jobs:train_each",
        (texts, str(folder)),
        ranks=ranks,
        folder=RunFolder(folder / "run"),
        hang_seconds=300,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Every job on 1, 3 and 5 ranks; each number of ranks is started once."""
    folder = tmp_path_factory.mktemp("found")
    return {ranks: on_ranks(ranks, jobs.JOBS, folder / str(ranks)) for ranks in (1, 3, 5)}


@pytest.mark.parametrize("name", jobs.JOBS)
def test_the_same_bits_on_1_3_and_5_ranks(trained, name):
    one = trained[1][0][name]
    for ranks, results in trained.items():
        assert [result[name] for result in results] == [one] * ranks


@pytest.mark.parametrize(("plain", "other"), jobs.SAME)
def test_what_never_changes_a_bit_does_not(trained, plain, other):
    assert trained[1][0][plain] == trained[1][0][other]


def test_all_jobs_differ_otherwise(trained):
    same = {other for _, other in jobs.SAME}
    found = [sha for name, sha in trained[1][0].items() if name not in same]
    assert len(set(found)) == len(found)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a small /dev/shm of its own")
def test_a_small_dev_shm_changes_no_bit_of_a_sharded_optimizers_job(trained, tmp_path):
    """As in a container, where /dev/shm is smaller than the buckets."""
    code = (
        "import json, sys, test_found; from pathlib import Path\n"
        "print(json.dumps(test_found.on_ranks(3, json.loads(sys.argv[2]), Path(sys.argv[1]))))\n"
    )
    names = ["fp32, sharded", "bf16, sharded", "experts, sharded"]
    script = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    ran = subprocess.run(
        [
            *("unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", code),
            *(str(tmp_path / "small"), json.dumps(names)),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    for result in json.loads(ran.stdout):
        assert result == {name: trained[1][0][name] for name in names}
    told = "".join((tmp_path / "small/run/logs" / f"rank-{rank}.log").read_text() for rank in range(3))
    assert "/dev/shm has" in told


def job_file(folder, **settings):
    path = folder / "job.toml"
    here = jobs.HERE
    path.write_text(
        jobs.JOB.replace('"models.py', f'"{here}/models.py').replace('"samples.py', f'"{here}/samples.py')
    )
    return path, [f"--set={key.replace('__', '.')}={value}" for key, value in settings.items()]


def steps_recorded(folder):
    return [e.step for e in read_events(RunFolder(folder).events(0)) if isinstance(e, Stepped)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"model__factory": f"{jobs.HERE}/models.py:with_batch_norm", "data__args": "{n = 310}"},
            ["1 sample(s) fails", "data.drop_last = true", "14 of 310 samples"],
        ),
        (
            {
                "eval__factory": f"{jobs.HERE}/samples.py:data",
                "eval__metrics": f'["{jobs.HERE}/models.py:one_number"]',
            },
            ["eval.metrics one_number returns one number", "(sum, count)"],
        ),
    ],
    ids=["a batch norm of one sample", "a metric that is no mean"],
)
def test_what_would_fail_after_hours_is_refused_before_the_first_step(settings, words, tmp_path):
    job, options = job_file(tmp_path, **settings)
    ended = train(job, tmp_path / "run", "--ranks", 2, *options)
    assert ended.code == 2, ended.err
    last = ended.err.strip().splitlines()[-1]
    assert all(word in last for word in words), last
    assert steps_recorded(tmp_path / "run") == []


def test_gradients_that_are_not_finite_are_named_and_reach_neither_weights_nor_checkpoints(tmp_path):
    """In the run's last step, without clipping; then again from the checkpoint before."""
    settings = {"model__factory": f"{jobs.HERE}/models.py:Root", "data__args": "{n = 592, zero_at = 591}"}
    job, options = job_file(
        tmp_path, data__shuffle="false", train__epochs=1, checkpoint__every_steps=5, **settings
    )
    for _ in range(2):
        ended = train(job, tmp_path / "run", "--ranks", 3, *options)
        assert ended.code == 1, ended.err
        last = ended.err.strip().splitlines()[-1]
        assert (
            "gradient of s.weight is not finite in shard 4 (rank 1, samples 559, 567, 575, 583, 591)" in last
        )
        assert "at step 15" in last
        assert "weights are not updated" in last
    assert steps_recorded(tmp_path / "run")[-1] == 14
