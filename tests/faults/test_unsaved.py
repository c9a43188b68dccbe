"""A run whose last checkpoint could not be saved is not done: it says so, and keeps the state elsewhere."""

import json
import os
import signal
import subprocess
import sys

import pytest
from support import FOLDER
from support.alone import train_alone
from support.commands import dure
from support.disks import fill, needs_root, small_disk
from support.leftovers import wait_until

from dure.base.run_folder import RunFolder
from dure.checkpoint.find import entries
from dure.observe.heartbeat import read_beat
from dure.storage import open_store

pytestmark = needs_root

JOB = """
name = "unsaved"
[model]
factory = "{here}/unsaved.py:model"
[data]
factory = "{here}/unsaved.py:Paced"
global_batch = 16
[eval]
factory = "{here}/unsaved.py:Paced"
[train]
lr = 0.01
epochs = 3
[team]
ranks = 2
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    path = tmp_path_factory.mktemp("job") / "job.toml"
    path.write_text(JOB.replace("{here}", str(FOLDER)))
    return path


@pytest.fixture(scope="module")
def undisturbed(job, tmp_path_factory):
    return train_alone(job, tmp_path_factory.mktemp("runs") / "run").weights_sha256


@pytest.fixture
def temporary(tmp_path):
    """What TMPDIR is for the commands of a test."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


@pytest.fixture
def disk(tmp_path):
    """A small disk for the run, on which there is room for its records but for no checkpoint."""
    with small_disk(tmp_path / "run", "400k") as place:
        yield place


def train(job, run, *arguments, temporary, **options):
    return dure("train", job, "--run-dir", run, "--json", *arguments, TMPDIR=str(temporary), **options)


def rescued_in(folder):
    """The checkpoints in a place that a run was rescued to."""
    (own,) = folder.iterdir()
    return [entry.trouble for entry in entries(open_store(str(own)), deep=True)]


def test_a_full_disk_ends_with_1_and_the_state_in_a_private_temporary_folder(
    job, undisturbed, disk, temporary
):
    ended = train(job, disk, temporary=temporary)
    assert ended.code == 1, ended.err
    assert ended.out == ""
    (kept,) = temporary.iterdir()
    last = ended.err.splitlines()[-1]
    assert "all steps are done, but the last checkpoint could not be saved" in last
    assert "the storage is full" in last
    assert f"--rescue-dir {kept}" in last
    assert "the checkpoint of step 12 could not be saved" in ended.err, "it was told at once, too"
    assert kept.stat().st_mode & 0o777 == 0o700
    assert rescued_in(kept) == [None]
    assert not list(disk.glob("checkpoints/*")), "nothing half is left where it belongs"

    subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)  # there is room now
    again = train(job, disk, "--rescue-dir", kept, temporary=temporary)
    assert again.summary["weights_sha256"] == undisturbed
    assert again.summary["resumed_from"] == 12
    assert again.summary["ledger"]["exactly_once"] is True
    assert again.summary["ledger"]["epochs"] == 3
    listed = json.loads(dure("checkpoints", disk, "--json").out)["checkpoints"]
    assert [(row["step"], row["verified"]) for row in listed] == [(12, True)]


@pytest.mark.soak
def test_with_a_rescue_folder_the_very_same_command_goes_on(job, undisturbed, disk, temporary, tmp_path):
    arguments = ["--rescue-dir", tmp_path / "rescue", "--set", "train.shard_optimizer=true"]
    ended = train(job, disk, *arguments, temporary=temporary)
    assert ended.code == 75, ended.err
    assert f"It is in {tmp_path / 'rescue'}" in ended.err.splitlines()[-1]
    assert rescued_in(tmp_path / "rescue") == [None]
    assert not list(temporary.iterdir())
    assert train(job, disk, *arguments, temporary=temporary).code == 75, "as long as there is no room"
    assert rescued_in(tmp_path / "rescue") == [None], "one is kept"
    subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
    assert (
        train(job, disk, *arguments, "--ranks", 3, temporary=temporary).summary["weights_sha256"]
        == undisturbed
    )


def test_a_run_that_is_stopped_on_a_full_disk_loses_nothing_either(
    job, undisturbed, disk, temporary, tmp_path
):
    command = [
        sys.executable,
        "-m",
        "dure",
        "train",
        job,
        "--run-dir",
        disk,
        "--rescue-dir",
        tmp_path / "rescue",
    ]
    slow = ["--set", "data.args.seconds=0.02"]
    process = subprocess.Popen(
        [*map(str, command), *slow],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)},
    )
    folder = RunFolder(disk)
    try:
        wait_until(lambda: (beat := read_beat(folder.heartbeat(0))) and beat.step >= 3, "step 3")
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 75, said
    assert "goes on from there" in said.splitlines()[-1]
    assert rescued_in(tmp_path / "rescue") == [None]
    subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
    again = train(job, disk, "--rescue-dir", tmp_path / "rescue", *slow, temporary=temporary)
    assert again.summary["weights_sha256"] == undisturbed
    assert again.summary["resumed_from"] >= 3


def test_a_folder_that_cannot_be_written_for_a_while_is_tried_again(job, undisturbed, disk, temporary):
    """Full when the training ends, and no longer while it tries: saved where it belongs, exit code 0."""
    filler = disk / "filler"
    subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
    fill(disk)
    command = [sys.executable, "-m", "dure", "train", str(job), "--run-dir", str(disk), "--json"]
    filler.rename(disk / "held")
    os.truncate(disk / "held", (disk / "held").stat().st_size - 200_000)  # room for its records
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)},
    )
    said = []
    try:
        for line in process.stderr:
            said.append(line)
            if "could not be saved" in line:
                (disk / "held").unlink(missing_ok=True)
        out = process.stdout.read()
        assert process.wait(300) == 0, said
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
    assert any("could not be saved" in line for line in said)
    assert json.loads(out)["weights_sha256"] == undisturbed
    assert not list(temporary.iterdir())
    listed = json.loads(dure("checkpoints", disk, "--json").out)["checkpoints"]
    assert [row["verified"] for row in listed] == [True]


SMALL = """
mount -t tmpfs -o size=64k none /mnt && mkdir /mnt/{top} && mount --rbind /tmp/{top} /mnt/{top} &&
mount --rbind /mnt /tmp && mount -t tmpfs -o size=64k none /var/tmp &&
{command}; code=$?; ls /tmp > {left}; ls /var/tmp >> {left}; exit $code
"""
"""A namespace in which all folders for temporary files are small; tells what is left in them."""


@pytest.mark.soak
def test_when_there_is_room_nowhere_the_run_says_so_and_leaves_nothing_half(job, disk, tmp_path):
    top, left = tmp_path.relative_to("/tmp").parts[0], tmp_path / "left"
    command = " ".join(map(str, (sys.executable, "-m", "dure", "train", job, "--run-dir", disk)))
    ended = subprocess.run(
        ["unshare", "-m", "sh", "-c", SMALL.format(top=top, command=command, left=left)],
        env={key: value for key, value in os.environ.items() if key != "TMPDIR"} | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert "elsewhere: " in last
    assert "--rescue-dir DIR" in last
    assert "dure-rescue" not in left.read_text()
    assert top in left.read_text()
