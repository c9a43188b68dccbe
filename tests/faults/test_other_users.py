"""Another user of the machine plants links, files and pipes where a run writes: nothing of anybody's is touched."""

import json
import os
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest
from support import FOLDER
from support.alone import train_alone
from support.commands import train

from dure.base.errors import UsageError
from dure.base.files import make_own_folder, open_own, open_plain, read_at_most
from dure.base.run_folder import RunFolder
from dure.checkpoint.places import Places
from dure.config import load_job

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be two users")

JOB = """
name = "planted"
[model]
factory = "{here}/broken.py:model"
[data]
factory = "{here}/broken.py:numbers"
global_batch = 16
[train]
epochs = 2
[team]
ranks = 2
"""


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(JOB.replace("{here}", str(FOLDER)))
    return path


@pytest.fixture
def shared():
    """A folder in which everybody may do everything; not in pytest's own, which it keeps from others."""
    with tempfile.TemporaryDirectory(prefix="dure-test-", dir="/tmp") as folder:
        place = Path(folder)
        place.chmod(0o777)
        yield place


@pytest.fixture
def victim(tmp_path):
    """A file of root's; gives its path, and afterwards it must be as it was."""
    path = tmp_path / "victim"
    path.write_text("precious\n")
    yield path
    assert path.read_text() == "precious\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def as_nobody(*commands):
    """In a shell: an interpreter that is root's own may be out of reach."""
    shell = ["sh", "-ec", "\n".join(commands)]
    subprocess.run(shell, user=NOBODY, group=NOBODY, extra_groups=[], check=True, cwd="/")


def test_a_run_folder_of_another_users_is_refused(job, shared, victim):
    run = shared / "run"
    as_nobody(f"mkdir -p {run}/logs", f"ln -s {victim} {run}/logs/rank-0.log")
    ended = train(job, run)
    assert ended.code == 2
    assert f"{run} belongs to another user (uid {NOBODY})" in ended.err
    assert sorted(os.listdir(run)) == ["logs"], "nothing was written there"


def test_a_folder_for_checkpoints_that_another_user_made_a_link_is_refused(job, shared, tmp_path):
    run, target = RunFolder(shared / "run"), tmp_path / "target"
    target.mkdir()
    run.create()
    run.path.chmod(0o777)
    as_nobody(f"ln -s {target} {run.path}/checkpoints")
    with pytest.raises(UsageError, match="a symbolic link of another user's"):
        Places.of_job(load_job(job), run).open_to_write()
    assert not list(target.iterdir())


@pytest.mark.parametrize("name", ["logs", "events", "heartbeat"])
def test_a_folder_of_the_run_that_another_user_made_a_link_is_refused(job, shared, tmp_path, name):
    run, target = RunFolder(shared / "run"), tmp_path / "target"
    target.mkdir()
    run.path.mkdir(mode=0o777)
    run.path.chmod(0o777)
    as_nobody(f"ln -s {target} {run.path}/{name}")
    with pytest.raises(PermissionError, match="a symbolic link of another user's"):
        run.create()
    assert not list(target.iterdir())


def test_links_in_place_of_a_runs_files_are_never_followed(job, shared, victim, tmp_path):
    run = RunFolder(shared / "run")
    run.create()
    for folder in (run.path, *(path for path in run.path.iterdir() if path.is_dir())):
        folder.chmod(0o777)
    planted = [
        *(
            make(rank)
            for rank in range(2)
            for make in (run.log, run.events, run.error, run.stacks, run.heartbeat)
        ),
        *(run.restarts, run.summary),
    ]
    as_nobody(*(f"ln -s {victim} {path}" for path in planted))
    ended = train(job, run.path)
    assert ended.summary["weights_sha256"] == train_alone(job, tmp_path / "alone").weights_sha256
    assert ended.err.count("rank-0.log is a symbolic link") == 1
    assert ended.err.count("rank-1.jsonl is a symbolic link") == 1
    assert json.loads(run.summary.read_text())["name"] == "planted", (
        "a file that appears whole takes the link's place"
    )

    run.lock.unlink()
    as_nobody(f"ln -s {victim} {run.lock}")
    ended = train(job, run.path)
    assert ended.code == 2
    assert f"{run.lock} is a symbolic link" in ended.err


def test_only_a_plain_file_of_ones_own_is_opened_to_write(shared, victim, tmp_path):
    write = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    own = shared / "own"
    make_own_folder(own)
    own.chmod(0o777)
    as_nobody(f"printf x > {own}/theirs", f"mkfifo {own}/pipe", f"ln -s /nowhere {own}/dangling")
    os.mknod(own / "device", 0o666 | stat.S_IFCHR, os.makedev(1, 5))
    for name, words in {
        "theirs": "belongs to another user",
        "pipe": "is a pipe",
        "dangling": "is a symbolic link",
        "device": "is a pipe, a socket or a device",
    }.items():
        with pytest.raises(PermissionError, match=words):
            open_own(own / name, write)
        with pytest.raises(PermissionError, match=words):
            open_own(own / name, os.O_RDWR | os.O_CREAT)
    assert (own / "theirs").read_text() == "x"
    with pytest.raises(IsADirectoryError):
        open_own(own, write)
    (own / "mine").write_text("old")
    os.close(open_own(own / "mine", write))
    assert (own / "mine").read_text() == ""
    link = tmp_path / "link"
    link.symlink_to(own)  # of one's own: to a larger disk, say
    os.close(open_own(link / "mine", write))


def test_pipes_devices_and_long_files_are_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), Path("/dev/stdin")):
        with pytest.raises(OSError, match="a pipe, a socket or a device"):
            open_plain(path)
    (tmp_path / "long").touch()
    os.truncate(tmp_path / "long", 1 << 40)
    with pytest.raises(OSError, match="longer than 1,000 bytes"):
        read_at_most(tmp_path / "long", 1000)
