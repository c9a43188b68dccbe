"""The preflight of a job whose storage is a bucket, against a real S3 server."""

import json
import uuid

import pytest
from support.commands import dure

from dure.doctor.checks.bucket import forget, seen, takes
from dure.doctor.plan import JobNeeds
from dure.storage import open_store
from dure.storage.bucket import BucketStore

JOB = """
storage = "{storage}"
[model]
factory = "parts.py:model"
[data]
factory = "parts.py:data"
args = {{ folder = "{{storage}}/training_data" }}
global_batch = 8
[train]
steps = 1
[team]
ranks = 2
[checkpoint]
folder = "{{storage}}/checkpoints/{{run}}"
"""


@pytest.fixture
def bucket(s3):
    """A place in a bucket with some data in it."""
    location = f"{s3.make_bucket(f'doctor-{uuid.uuid4().hex[:8]}')}/job"
    open_store(location).write_whole("training_data/0.png", [b"photo"])
    return location


def write_job(folder, storage, more=""):
    (folder / "parts.py").write_text("def model(): ...\n\n\ndef data(folder): ...\n")
    path = folder / "job.toml"
    path.write_text(JOB.format(storage=storage) + more)
    return path


def look(job, *options, **env):
    """The doctor's exit code, and what it found: check and node → level, what, and what to do; the first of each."""
    ended = dure("doctor", job, "--json", *options, cwd=job.parent, **env)
    assert ended.out, ended.err
    return ended.code, {
        (one["check"], one["node"]): (one["level"], one["value"], one["fix"])
        for one in reversed(json.loads(ended.out)["findings"])
    }


def test_a_bucket_is_read_and_tried_by_what_a_checkpoint_does_to_it(bucket, tmp_path):
    code, found = look(write_job(tmp_path, bucket))
    assert code == 0
    assert found["storage", "localhost"][:2] == ("ok", bucket)
    told = f"{bucket}/checkpoints takes put, conditional put, get and delete"
    assert found["read_write", "localhost"][:2] == ("ok", told)
    assert open_store(bucket).names("checkpoints") == []


def test_data_that_is_not_in_the_bucket_is_named(bucket, tmp_path):
    job = write_job(tmp_path, bucket)
    code, found = look(job, "--set", 'data.args.folder="{storage}/photos"')
    assert code == 4
    assert found["storage", "localhost"][:2] == ("bad", f"{bucket} has no {bucket}/photos")


def test_wrong_credentials_are_told_with_the_way_out(bucket, tmp_path):
    code, found = look(write_job(tmp_path, bucket), AWS_SECRET_ACCESS_KEY="wrong")
    level, told, way_out = found["storage", "localhost"]
    assert (code, level) == (4, "bad")
    assert "refuses (403 SignatureDoesNotMatch)" in told
    assert "correct AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in way_out


def test_missing_credentials_are_told_with_the_way_out(bucket, tmp_path, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    code, found = look(write_job(tmp_path, bucket))
    level, told, way_out = found["storage", "localhost"]
    assert (code, level) == (4, "bad")
    assert told == f"{bucket}: there are no credentials here"
    assert way_out.startswith("set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY on this node")


def test_a_server_that_ignores_conditions_is_found_and_nothing_is_left_there(bucket, monkeypatch):
    plan = JobNeeds(saves=f"{bucket}/checkpoints")
    assert takes(plan, "node0", "token").words == "read_write.puts"
    with monkeypatch.context() as ignored:
        # The condition cannot be taken out on the way, as it is signed.
        ignored.setattr(BucketStore, "_create", BucketStore._put)
        assert takes(plan, "node1", "token").words == "read_write.unconditional"
    assert seen(plan, "token", ["node0", "node1", "node2"]) == ["node0", "node1"]
    forget(plan, "node0", "token")
    forget(plan, "node1", "token")
    assert open_store(bucket).names("checkpoints") == []


def test_a_bucket_that_is_not_there_is_named(s3, tmp_path):
    code, found = look(write_job(tmp_path, "s3://no-such-bucket/job"))
    level, told, way_out = found["storage", "localhost"]
    assert (code, level) == (4, "bad")
    assert "has no bucket no-such-bucket" in told
    assert way_out.startswith("make the bucket")


def test_two_nodes_of_slurm_see_each_others_marks_in_the_bucket(bucket, slurm, tmp_path):
    """And in the run's folder, which is none of the bucket's."""
    job = write_job(tmp_path, bucket, "[cluster]\nnodes = 2\n[slurm]\npartition = 'test'\n")
    ended = dure("doctor", job, **slurm.environment)
    assert ended.code == 2
    assert "give one with --run-dir" in ended.err
    code, found = look(job, "--run-dir", tmp_path / "runs" / "a", **slurm.environment)
    assert code == 0
    for node in ("node0", "node1"):
        assert found["storage", node][:2] == ("ok", bucket)
        assert found["both_ways", node][:2] == ("ok", "reads what every node writes")
    assert open_store(bucket).names("checkpoints") == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.toml", "parts.py"]
