"""Several nodes, one run: the documents' two nodes by hand and by ssh, and what happens when a cable is pulled."""

import os
import re
import shutil
import signal
import socket
import time

import psutil
import pytest
from alone import train_alone
from commands import EXAMPLES, dure, train
from nodes_stories import Started, furthest_step, put_job, restarts, set_pace, wait_for_step

from dure.demo.draw import draw_training_data
from dure.lab import Lab, why_not_here
from dure.lab.remote import why_no_ssh

REASON = why_not_here() or why_no_ssh()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"lab: {REASON}")

STEPS = 400
SLOW = 0.012
"""Seconds a sample: a step of 4 or 8 samples a rank takes 50 to 100 ms."""


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def lab(storage):
    with Lab(f"nodes-{os.getpid()}", storage=storage) as made:
        yield made


@pytest.fixture(scope="module")
def weights(storage, tmp_path_factory):
    """The job's weights after all its steps, trained on one rank, without any of it."""
    job = put_job(storage, STEPS)
    return train_alone(job, tmp_path_factory.mktemp("alone") / "run").weights_sha256


@pytest.fixture
def start(lab, tmp_path):
    started = []

    def start_one(place, *arguments):
        started.append(Started(lab, place, arguments, tmp_path))
        return started[-1]

    yield start_one
    for one in started:
        one.end()
    lab.heal()


def by_hand(node, run, *arguments, nodes="2"):
    own = ["--node-rank", node, "--leader", "10.0.1.10:29400", "--run-dir", f"/mnt/shared/checkpoints/{run}"]
    return ["train", "/mnt/shared/steady.toml", "--nodes", nodes, *own, "--json", *arguments]


def test_two_nodes_by_hand_train_the_same_bits_and_say_where_each_rank_is(start, storage, weights):
    put_job(storage, STEPS)
    second = start("node1", *by_hand(1, "hand"))
    second.says("waits for the leader at 10.0.1.10:29400")
    first = start("node0", *by_hand(0, "hand"))
    summary = first.summary()
    assert summary["weights_sha256"] == weights
    assert summary["ranks"] == 4
    assert "ranks 0-1 on node0 (10.0.1.10), ranks 2-3 on node1 (10.0.1.11)" in first.said
    assert second.process.wait(20) == 0
    assert "the leader, 10.0.1.10, has the summary" in second.said
    assert "127.0.0.1" not in first.said + second.said


@pytest.mark.soak
def test_the_documents_script_runs_on_two_nodes_with_the_same_bits(start, storage, tmp_path):
    shutil.copy(EXAMPLES / "ddp.py", storage)
    draw_training_data(storage / "training_data", count=80, heldout=4, say=lambda text: None)
    place = ["--ranks", 2, "--nodes", 2, "--leader", "10.0.1.10:29500"]
    script = ["run", "/mnt/shared/ddp.py", "--run-dir"]
    first, second = (
        start(f"node{n}", *script, f"/mnt/shared/checkpoints/ddp-{n}", *place, "--node-rank", n)
        for n in (0, 1)
    )
    assert first.process.wait(90) == 0, first.said
    assert second.process.wait(20) == 0, second.said
    assert "ranks 0-1 on node0 (10.0.1.10), ranks 2-3 on node1 (10.0.1.11)" in first.said
    alone = dure("run", storage / "ddp.py", "--ranks", 1, "--run-dir", tmp_path / "alone")
    fingerprints = set(
        re.findall(r"rank \d of \d: (\w{16})", alone.out + first.out.read_text() + second.out.read_text())
    )
    assert len(fingerprints) == 1


def test_a_killed_agent_leaves_no_orphan_and_the_rest_ends_resumable(start, lab, storage):
    put_job(storage, STEPS, SLOW)
    run = storage / "checkpoints" / "killed"
    first, second = (start(f"node{node}", *by_hand(node, "killed")) for node in (0, 1))
    wait_for_step(run, 20, first)
    before = {place.name: place.processes for place in lab.status()}
    assert before["node1"] > 3
    agent = next(
        p for p in psutil.Process(second.process.pid).children(recursive=True) if "train" in p.cmdline()
    )
    agent.kill()
    deadline = time.monotonic() + 20
    while {place.name: place.processes for place in lab.status()}[
        "node1"
    ] > 2:  # the node's own first processes
        assert time.monotonic() < deadline, "processes of a killed agent live on"
        time.sleep(0.1)
    assert first.process.wait(30) == 75
    assert "node 1 (node1, 10.0.1.11) is lost" in first.said
    assert "resumable" in first.said


def test_cables_are_pulled_and_the_run_goes_on_with_the_same_bits(start, lab, storage, weights):
    """A node is cut for good and comes back, a cable is out for two seconds, and then the leader is cut."""
    put_job(storage, STEPS, SLOW)
    run = storage / "checkpoints" / "cut"
    boss = start(
        "login",
        *["train", "/mnt/shared/steady.toml", "--hosts", "10.0.1.10,10.0.1.11", "--nodes", "1:2", "--json"],
        *["--run-dir", "/mnt/shared/checkpoints/cut", "--set", f"cluster.ssh=ssh -F {lab.ssh_config}"],
    )
    wait_for_step(run, 20, boss)

    lab.cut("node1")
    cut_at = time.monotonic()
    named_at, heard = boss.says("node 1 (node1, 10.0.1.11) is lost: not heard of for", 30)
    assert named_at - cut_at < 20  # the product's own deadline is 6 s
    boss.says("ranks 0-1 on node0 (10.0.1.10)", after=heard)
    wait_for_step(run, furthest_step(run) + 20, boss)

    lab.heal("node1")
    _, heard = boss.says("node 1 (node1, 10.0.1.11) joins", after=heard)
    boss.says("ranks 2-3 on node1", after=heard)
    wait_for_step(run, furthest_step(run) + 20, boss)
    so_far = restarts(run)

    lab.cut("node1")
    time.sleep(2)
    lab.heal("node1")
    wait_for_step(run, furthest_step(run) + 30, boss)
    assert restarts(run) == so_far  # a cable that is out for two seconds is no loss
    assert "stops after this step" not in boss.said  # whoever was cut off asked nobody to stop

    lab.cut("node0")
    cut_at = time.monotonic()
    ended_at, heard = boss.says("the leader, 10.0.1.10, is lost", 40)
    assert ended_at - cut_at < 30  # the product's own deadline is 6 s
    _, heard = boss.says("starts again with 10.0.1.11 as the leader", after=heard)
    boss.says("ranks 0-1 on node1 (10.0.1.11)", after=heard)
    set_pace(storage, 0.0)
    summary = boss.summary()
    assert summary["weights_sha256"] == weights
    lab.heal()


def test_ctrl_c_at_the_supervisor_saves_everywhere_and_leaves_no_agent(start, lab, storage):
    put_job(storage, STEPS, SLOW)
    run = storage / "checkpoints" / "stopped"
    boss = start(
        "login",
        *["train", "/mnt/shared/steady.toml", "--hosts", "10.0.1.10,10.0.1.11", "--json"],
        *["--run-dir", "/mnt/shared/checkpoints/stopped", "--set", f"cluster.ssh=ssh -F {lab.ssh_config}"],
    )
    wait_for_step(run, 20, boss)
    quiet = {place.name: place.processes for place in lab.status()}
    assert quiet["node1"] > 3
    supervisor = next(
        p for p in psutil.Process(boss.process.pid).children(recursive=True) if "train" in p.cmdline()
    )
    supervisor.send_signal(signal.SIGINT)
    assert boss.process.wait(40) == 75, boss.said
    assert "stopped and saved" in boss.said
    assert any((run / "checkpoints").iterdir())
    deadline = time.monotonic() + 20
    while any(place.processes > 3 for place in lab.status() if place.name != "login"):
        assert time.monotonic() < deadline, "agents live on"
        time.sleep(0.1)


def test_a_job_for_two_nodes_says_how_to_start_it(storage):
    job = put_job(storage, STEPS)
    ended = dure("train", job, "--nodes", 2)
    assert ended.code == 2
    assert "--node-rank" in ended.err
    assert "--hosts" in ended.err
    half = dure("train", job, "--nodes", 2, "--node-rank", 0)
    assert half.code == 2
    assert "--leader" in half.err


def test_a_leader_that_never_comes_is_named_with_the_way_out(storage, tmp_path):
    job = put_job(storage, STEPS)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    ended = train(
        job, tmp_path / "run", "--nodes", 2, "--node-rank", 1, "--leader", f"127.0.0.1:{free}",
        "--set", "cluster.join_seconds=2",
    )  # fmt: skip
    assert ended.code == 1
    assert f"waited 2 s for the leader at 127.0.0.1:{free}, in vain" in ended.err
    assert "dure doctor" in ended.err


def test_a_second_node_that_never_comes_is_named_by_the_leader(storage, tmp_path):
    job = put_job(storage, STEPS)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    ended = train(
        job, tmp_path / "run", "--nodes", 2, "--node-rank", 0, "--leader", f"127.0.0.1:{free}",
        "--set", "cluster.join_seconds=3",
    )  # fmt: skip
    assert ended.code == 1
    assert "for node 1 of 2" in ended.err
