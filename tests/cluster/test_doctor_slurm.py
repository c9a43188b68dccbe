"""The preflight on nodes that Slurm gives: the same look as over ssh, and the nodes are always given back."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import psutil
import pytest
from support.commands import dure
from support.doctor_looks import JOB, failed
from support.leftovers import wait_until

ON_SLURM = """
[cluster]
nodes = 2
[slurm]
partition = "test"
options = ["--mail-type=NONE", "--comment=a look"]
"""


@pytest.fixture
def here(slurm, monkeypatch):
    """This process speaks to the test's Slurm."""
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    return slurm


def on_node(slurm, node, script):
    """Run a script in the mount namespace of a node, as root there."""
    words = ["nsenter", "-t", str(slurm.daemon(node).pid), "-m", "sh", "-ec", script]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@contextmanager
def mounted(slurm, node, script, undo):
    on_node(slurm, node, script)
    try:
        yield
    finally:
        on_node(slurm, node, undo)


@pytest.fixture
def shared(here, tmp_path):
    """The documents' storage, mounted on both nodes as they draw it: read-only, but for its checkpoints/."""
    folder = tmp_path / "shared"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "training_data").mkdir()
    (folder / "training_data" / "0.png").write_bytes(b"photo")
    (folder / "ddp.py").write_text("def model(): ...\n\n\ndef data(folder): ...\n")
    (folder / "job.toml").write_text(JOB + ON_SLURM)
    lay = f"""
        mount --bind '{folder}' '{folder}'; mount --bind '{folder}/checkpoints' '{folder}/checkpoints'
        mount -o remount,bind,ro '{folder}'
    """
    lift = f"umount '{folder}/checkpoints'; umount '{folder}'"
    with mounted(here, "node0", lay, lift), mounted(here, "node1", lay, lift):
        yield folder


def jobs(slurm):
    """The jobs that hold nodes or wait for some."""
    return slurm.command("squeue", "--noheader", "--states=PENDING,RUNNING,CONFIGURING").stdout.split("\n")[
        :-1
    ]


def test_nodes_that_slurm_gives_pass_and_are_given_back(here, shared):
    ended = dure("doctor", shared / "job.toml", "--json")
    assert (ended.code, ended.err) == (0, ""), ended.out
    found = json.loads(ended.out)
    assert found["nodes"] == ["node0", "node1"]
    assert failed(found) == set()
    told = {(one["check"], one["node"]): one["value"] for one in found["findings"]}
    checks = {"reach", "versions", "digests", "storage", "both_ways", "read_only", "read_write", "network"}
    assert {(check, node) for check in checks for node in ("node0", "node1")} <= set(told)
    assert told["read_write", "node1"] == f"{shared}/checkpoints takes write, fsync and rename"
    assert [(pair["from"], pair["to"]) for pair in found["pairs"]] == [("node0", "node1"), ("node1", "node0")]
    wait_until(lambda: jobs(here) == [], "the nodes to be given back")
    assert list((shared / "checkpoints").iterdir()) == []


def test_what_is_wrong_on_one_node_is_named_with_it_also_inside_an_allocation(here, shared):
    remount = f"mount -o remount,bind,%s '{shared}/checkpoints'"
    with mounted(here, "node1", remount % "ro", remount % "rw"):
        # Wide: no sentence is broken where the path before it is long.
        words = [
            "env",
            "COLUMNS=400",
            sys.executable,
            "-m",
            "dure",
            "doctor",
            str(shared / "job.toml"),
            "--lang",
            "ko",
        ]
        ended = here.command("salloc", "--quiet", "--nodes=2", "--cpus-per-task=2", "--no-bell", *words)
    assert ended.returncode == 4, ended.stdout
    assert "✗ node1" in ended.stdout
    assert "✓ node0" in ended.stdout
    assert "읽기·쓰기(`rw`)로 마운트하세요" in " ".join(ended.stdout.split())
    assert "사전 점검 실패, 노드 node1: 읽기·쓰기" in ended.stderr


@pytest.mark.soak
def test_each_node_goes_into_the_image_by_itself(here, shared, image):
    os.link(image, shared / image.name)
    remount = f"mount -o remount,bind,%s '{shared}/checkpoints'"
    with mounted(here, "node1", remount % "ro", remount % "rw"):
        ended = dure("doctor", shared / "job.toml", "--json", "--set", f"cluster.image={image.name}")
    found = json.loads(ended.out)
    assert failed(found) == {("read_write", "node1")}
    digests = {one["node"]: one["value"] for one in found["findings"] if one["check"] == "digests"}
    assert len(digests) == 2
    assert all("image " in value for value in digests.values())
    assert list((shared / "checkpoints").iterdir()) == []


def start(shared, *options):
    """The doctor, running; its end is awaited by whoever started it."""
    return subprocess.Popen(
        [sys.executable, "-m", "dure", "doctor", str(shared / "job.toml"), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def nothing_is_left(slurm):
    wait_until(lambda: jobs(slurm) == [], "the nodes to be given back")
    own = ("--serve", "salloc", "srun")

    def running():
        found = []
        for process in slurm.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                found += [process] if any(word in process.cmdline() for word in own) else []
        return found

    wait_until(lambda: not running(), lambda: f"the end of {running()}")


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
def test_however_the_doctor_ends_the_nodes_are_given_back(here, shared, stop):
    for _ in range(
        5
    ):  # a look takes two seconds: on a busy machine it may be over before it is seen to hold nodes
        with start(shared) as process:
            wait_until(lambda: jobs(here) != [] or process.poll() is not None, "nodes")
            process.send_signal(stop)
            _, said = process.communicate(timeout=300)
        if process.returncode != 0:
            break
    assert process.returncode == (130 if stop is signal.SIGINT else -9)
    assert stop is signal.SIGKILL or "Ctrl-C: stopped" in said
    nothing_is_left(here)
    assert list((shared / "checkpoints").iterdir()) == []


def test_without_free_nodes_it_says_so_in_time_and_waits_for_none(here, shared):
    ended = dure("doctor", shared / "job.toml", "--set", "cluster.nodes=3", "--wait", 2)
    assert ended.code == 1
    assert "Slurm had no 3 nodes free within 2 s" in ended.err
    assert "--wait SECONDS waits longer" in ended.err
    with start(shared, "--set", "cluster.nodes=3") as process:
        wait_until(lambda: jobs(here) != [] or process.poll() is not None, "a place in the queue")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=300)
    assert process.returncode == 130
    nothing_is_left(here)


def test_what_slurm_refuses_is_said_in_its_words(here, shared):
    ended = dure("doctor", shared / "job.toml", "--set", "slurm.partition=nope")
    assert ended.code == 1
    assert "invalid partition specified: nope" in ended.err
    ended = dure("doctor", "--slurm")
    assert ended.code == 2
    assert "--slurm needs a job file" in ended.err
