"""The runner of an image: the first that starts it, and why others were passed over."""

import hashlib

import pytest

from dure.base.errors import JobError, UsageError
from dure.config import load_job
from dure.image import choice
from dure.image.choice import choose_runner

WORKS = 'echo "$0 $*" >> "$CALLS"'
NOT_SET_UP = """
echo "[INFO] looking around" >&2
echo "mkdir: cannot create directory '/run/enroot': Permission denied" >&2
exit 1
"""


@pytest.fixture
def image(tmp_path):
    image = tmp_path / "x.sqsh"
    image.write_bytes(b"hsqs" + bytes(100))
    return image


@pytest.fixture
def node(tmp_path, monkeypatch):
    """A node on which just these programs are installed; returns what they were called with."""
    bin, calls = tmp_path / "bin", tmp_path / "calls"
    bin.mkdir()
    monkeypatch.setenv("PATH", str(bin))
    monkeypatch.setenv("CALLS", str(calls))
    (bin / "env").symlink_to("/usr/bin/env")

    def has(**programs):
        for name, does in programs.items():
            (bin / name).write_text(f"#!/bin/sh\n{does}\n")
            (bin / name).chmod(0o755)
        return lambda: calls.read_text() if calls.exists() else ""

    return has


def runner_of(loaded, image):
    chosen = choose_runner(loaded, image)
    assert chosen.digest == hashlib.sha256(image.read_bytes()).hexdigest()
    return chosen.runner, chosen.program


def job(tmp_path, runner):
    path = tmp_path / "job.toml"
    path.write_text(
        '[model]\nfactory = "model.py:model"\n[data]\nfactory = "model.py:data"\nglobal_batch = 8\n'
        f'[train]\nsteps = 1\n[cluster]\nimage = "x.sqsh"\nrunner = "{runner}"\n'
    )
    return load_job(path)


def test_the_first_that_starts_the_image_is_taken_without_a_word(tmp_path, image, node, capfd):
    calls = node(enroot=WORKS, apptainer=WORKS, bwrap=WORKS)
    assert runner_of(job(tmp_path, "auto"), image) == ("enroot", "enroot")
    assert calls() == f"{tmp_path}/bin/enroot start -- {image} /bin/sh -c :\n"
    assert capfd.readouterr() == ("", "")


def test_one_that_is_installed_but_not_set_up_is_passed_over_with_its_last_words(
    tmp_path, image, node, capfd
):
    node(enroot=NOT_SET_UP, bwrap="exit 1")
    assert runner_of(job(tmp_path, "auto"), image) == ("bubblewrap", "bwrap")
    assert capfd.readouterr().err == (
        f"dure: enroot cannot start {image}: mkdir: cannot create directory '/run/enroot': Permission denied; "
        "bwrap runs it instead\n"
    )


def test_each_that_cannot_is_named(tmp_path, image, node, capfd):
    calls = node(
        enroot="exit 3", apptainer="echo 'FATAL: no user namespaces' >&2; exit 255", singularity=WORKS
    )
    assert runner_of(job(tmp_path, "auto"), image) == ("apptainer", "singularity")
    told = capfd.readouterr().err
    assert f"enroot cannot start {image}: exit code 3; " in told
    assert f"apptainer cannot start {image}: FATAL: no user namespaces; singularity runs it" in told
    assert calls().endswith(f"{image} /bin/sh -c :\n")


def test_one_that_hangs_is_passed_over(tmp_path, image, node, capfd, monkeypatch):
    monkeypatch.setattr(choice, "_TRIAL_SECONDS", 0.5)
    node(enroot="exec /bin/sleep 600", bwrap=WORKS)
    assert runner_of(job(tmp_path, "auto"), image) == ("bubblewrap", "bwrap")
    assert "it had not ended after" in capfd.readouterr().err


def test_when_none_can_all_are_named_with_the_way_out(tmp_path, image, node):
    node()
    with pytest.raises(
        JobError, match="no enroot or apptainer or singularity or bwrap to run it; install one"
    ):
        runner_of(job(tmp_path, "auto"), image)
    node(enroot=NOT_SET_UP)
    with pytest.raises(
        JobError,
        match=r"no apptainer or singularity or bwrap to run it; enroot cannot start .*Permission denied",
    ):
        runner_of(job(tmp_path, "auto"), image)


def test_one_that_the_job_names_is_taken_as_it_is(tmp_path, image, node, capfd):
    calls = node(enroot=NOT_SET_UP, singularity=WORKS, bwrap=WORKS)
    assert runner_of(job(tmp_path, "enroot"), image) == ("enroot", "enroot")
    assert runner_of(job(tmp_path, "apptainer"), image) == ("apptainer", "singularity")
    assert runner_of(job(tmp_path, "bubblewrap"), image) == ("bubblewrap", "bwrap")
    assert calls() == ""
    assert capfd.readouterr().err == ""
    with pytest.raises(JobError, match="dure submit"):
        runner_of(job(tmp_path, "pyxis"), image)


def test_one_that_the_job_names_must_be_there(tmp_path, image, node):
    node(enroot=WORKS)
    with pytest.raises(JobError, match="no apptainer or singularity to run it; install one"):
        runner_of(job(tmp_path, "apptainer"), image)


def test_an_image_that_is_not_what_was_recorded_is_not_even_tried(tmp_path, image, node):
    calls = node(enroot=WORKS)
    (tmp_path / "x.sqsh.sha256").write_text(f"{'0' * 64}  x.sqsh\n")
    with pytest.raises(UsageError, match="is damaged or another one"):
        runner_of(job(tmp_path, "auto"), image)
    assert calls() == ""
