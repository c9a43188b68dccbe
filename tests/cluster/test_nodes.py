"""Several nodes, one run: the documents' two nodes by hand and by ssh, and what happens when a cable is pulled."""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from itertools import pairwise

import pytest
from support import corrupting
from support.alone import train_alone
from support.commands import EXAMPLES, dure, train
from support.leftovers import wait_until
from support.nodes_stories import Started, furthest_step, put_job, restarts, set_pace, wait_for_step

from dure.base.team_key import make_key_file
from dure.tools.bench.ports import free_ports
from dure.tools.demo.draw import draw_training_data
from dure.tools.lab import Lab, why_not_here
from dure.tools.lab.remote import why_no_ssh

REASON = why_not_here() or why_no_ssh()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"lab: {REASON}")

STEPS = 200
SLOW = 0.012
"""Seconds a sample: a step of 4 or 8 samples a rank takes 50 to 100 ms."""
KEY = "/mnt/shared/checkpoints/team.key"
HELD = 0.12
"""While a test waits for something else than steps, so that the run cannot come to its end meanwhile."""


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


def go_on(run, steps, started, storage):
    """Let the run do some steps, and hold it back then."""
    set_pace(storage, SLOW)
    wait_for_step(run, furthest_step(run) + steps, started)
    set_pace(storage, HELD)


def processes_on(lab, node):
    """How many run on a node, beside its first."""
    return {place.name: place.processes for place in lab.status()}[node]


def a_key(folder):
    make_key_file(folder / "team.key")
    return folder / "team.key"


def by_hand(node, run, *arguments, nodes="2"):
    own = ["--node-rank", node, "--leader", "10.0.1.10:29400", "--run-dir", f"/mnt/shared/checkpoints/{run}"]
    own += ["--team-key", KEY]
    return ["train", "/mnt/shared/steady.toml", "--nodes", nodes, *own, "--json", *arguments]


def test_two_nodes_by_hand_train_the_same_bits_and_say_where_each_rank_is(start, storage, weights):
    put_job(storage, STEPS)
    encrypted = ("--set", "cluster.tls=true")
    second = start("node1", *by_hand(1, "hand", *encrypted))
    second.says(f"waits for the team key file {KEY}")
    first = start("node0", *by_hand(0, "hand", *encrypted))
    summary = first.summary()
    assert summary["weights_sha256"] == weights
    assert summary["ranks"] == 4
    assert "ranks 0-1 on node0 (10.0.1.10), ranks 2-3 on node1 (10.0.1.11)" in first.said
    assert second.process.wait(120) == 0
    assert "the leader, 10.0.1.10, has the summary" in second.said
    assert "127.0.0.1" not in first.said + second.said


@pytest.mark.soak
def test_nodes_that_find_their_leader_by_ipv6_train_the_same_bits(start, lab, storage, weights):
    for node in (0, 1):
        address = ["ip", "address", "add", f"fd00::{10 + node}/64", "dev", "eth0", "nodad"]
        subprocess.run(lab.command(f"node{node}", address), check=True, timeout=60)
    put_job(storage, STEPS)
    options = ("--leader", "[fd00::10]:29400", "--set", "cluster.tls=true")
    second, first = (start(f"node{node}", *by_hand(node, "ipv6", *options)) for node in (1, 0))
    assert first.summary()["weights_sha256"] == weights
    assert second.process.wait(120) == 0, second.said
    assert "ranks 0-1 on node0 (fd00::10), ranks 2-3 on node1 (fd00::11)" in first.said


def test_when_storage_goes_away_on_one_node_the_other_saves_the_end_for_both(start, lab, storage, weights):
    put_job(storage, STEPS, SLOW)
    run = storage / "checkpoints" / "one-node"
    first, second = (start(f"node{node}", *by_hand(node, "one-node")) for node in (0, 1))
    go_on(run, 5, first, storage)
    inside = "/mnt/shared/checkpoints/one-node"
    mount = f"mount --bind {inside} {inside} && mount -o remount,bind,ro {inside}"
    subprocess.run(lab.command("node1", ["sh", "-c", mount]), check=True, timeout=60)
    try:
        first.says("could not be saved: rank 2")
        set_pace(storage, 0.0)
        summary = first.summary()
        assert second.process.wait(120) == 0, second.said
    finally:
        subprocess.run(lab.command("node1", ["umount", "-l", inside]), check=True, timeout=60)
    assert summary["weights_sha256"] == weights
    assert any("the last checkpoint was saved by node0 alone" in note for note in summary["notes"])
    assert summary["ledger"]["exactly_once"] is True
    listed = json.loads(dure("checkpoints", run, "--json").out)["checkpoints"]
    assert (listed[0]["step"], listed[0]["files"], listed[0]["verified"]) == (STEPS, 2, True)
    assert "cannot record events" in second.said, "told on the node whose disk it is"


@pytest.mark.soak
def test_the_documents_script_runs_on_two_nodes_with_the_same_bits(start, storage, tmp_path):
    shutil.copy(EXAMPLES / "ddp.py", storage)
    draw_training_data(storage / "training_data", count=80, heldout=4, say=lambda text: None)
    place = ["--ranks", 2, "--nodes", 2, "--leader", "10.0.1.10:29500", "--team-key", KEY]
    script = ["run", "/mnt/shared/ddp.py", "--run-dir"]
    first, second = (
        start(f"node{n}", *script, f"/mnt/shared/checkpoints/ddp-{n}", *place, "--node-rank", n)
        for n in (0, 1)
    )
    assert first.process.wait(300) == 0, first.said
    assert second.process.wait(120) == 0, second.said
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
    go_on(run, 10, first, storage)
    assert processes_on(lab, "node1") > 3
    second.agent().kill()
    # The node's own first processes stay.
    wait_until(lambda: processes_on(lab, "node1") <= 2, "the end of a killed agent's processes")
    assert first.process.wait(240) == 75
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
    boss.says("ranks 2-3 on node1 (10.0.1.11)")  # a run of one or two nodes may begin with one
    go_on(run, 10, boss, storage)

    lab.cut("node1")
    _, heard = boss.says("node 1 (node1, 10.0.1.11) is lost: not heard of for ")
    boss.says(" s", after=heard)
    assert 6 <= int(boss.said[heard:].split()[0]) < 20  # the product's own deadline is 6 s
    boss.says("ranks 0-1 on node0 (10.0.1.10)", after=heard)
    go_on(run, 10, boss, storage)

    lab.heal("node1")
    _, heard = boss.says("node 1 (node1, 10.0.1.11) joins", after=heard)
    boss.says("ranks 2-3 on node1", after=heard)
    go_on(run, 10, boss, storage)
    so_far = restarts(run)

    away = cut_for(lab, "node1", 2)
    go_on(run, 20, boss, storage)
    if away < 3:  # or this machine stood still meanwhile, and it was another fault
        assert restarts(run) == so_far  # a cable that is out for two seconds is no loss
    assert "stops after this step" not in boss.said  # whoever was cut off asked nobody to stop

    lab.cut("node0")
    cut_at = time.monotonic()
    ended_at, heard = boss.says("the leader, 10.0.1.10, is lost")
    assert ended_at - cut_at < 100  # the product's own deadline is 6 s
    _, heard = boss.says("starts again with 10.0.1.11 as the leader", after=heard)
    boss.says("ranks 0-1 on node1 (10.0.1.11)", after=heard)
    set_pace(storage, 0.0)
    summary = boss.summary()
    assert summary["weights_sha256"] == weights
    lab.heal()


def cut_for(lab, node, seconds):
    """Pull a node's cable and plug it in again, by one command, which no busy machine draws out; the seconds."""
    began = time.monotonic()
    script = f"ip link set {node} down && sleep {seconds} && ip link set {node} up"
    subprocess.run(lab.command("login", ["sh", "-c", script]), check=True, timeout=300)
    return time.monotonic() - began


def supervised(start, lab, run):
    """The command that trains on both nodes, or on one of them, from the login."""
    return start(
        "login",
        *["train", "/mnt/shared/steady.toml", "--hosts", "10.0.1.10,10.0.1.11", "--nodes", "1:2", "--json"],
        *["--run-dir", f"/mnt/shared/checkpoints/{run}", "--set", f"cluster.ssh=ssh -F {lab.ssh_config}"],
    )


def test_a_leader_and_then_a_node_that_are_cut_for_seven_seconds_cost_a_restart_and_no_bit(
    start, lab, storage, weights
):
    """Just longer than a lease: the agent has ended by itself when the cable is back, and ssh still lives to say so."""
    put_job(storage, STEPS, HELD)
    run = storage / "checkpoints" / "seven"
    boss = supervised(start, lab, "seven")
    boss.says("ranks 2-3 on node1 (10.0.1.11)")
    wait_for_step(run, 4, boss)
    cut_for(lab, "node0", 7)
    _, heard = boss.says("starts again with 10.0.1.11 as the leader")
    _, heard = boss.says("ranks 2-3 on node0 (10.0.1.10)", after=heard)  # at once, or when it is taken back
    wait_for_step(run, furthest_step(run) + 2, boss)
    cut_for(lab, "node0", 7)
    boss.says("ranks 2-3 on node0 (10.0.1.10)", after=heard)
    set_pace(storage, 0.0)
    assert boss.summary()["weights_sha256"] == weights
    assert "is not started again" not in boss.said


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(20))
def test_ten_random_cuts_end_in_the_same_bits_or_resumable(start, lab, storage, weights, seed):
    draw = random.Random(seed)
    put_job(storage, STEPS, 4 * HELD)
    run = storage / "checkpoints" / f"cuts-{seed}"
    boss = supervised(start, lab, f"cuts-{seed}")
    wait_for_step(run, 2, boss)
    cuts = []
    for _ in range(10):
        time.sleep(draw.uniform(0.0, 10.0))
        if boss.process.poll() is not None:
            break
        cuts.append((draw.choice(["node0", "node1"]), round(draw.uniform(0.5, 12.0), 1)))
        cut_for(lab, *cuts[-1])
    set_pace(storage, 0.0)
    codes = [boss.process.wait(600)]
    assert codes[0] in (0, 75), (cuts, boss.said)
    while codes[-1] == 75 and len(codes) < 5:
        boss = supervised(start, lab, f"cuts-{seed}")
        codes.append(boss.process.wait(600))
    print(
        f"seed {seed}: {len(cuts)} cuts {cuts}, exit codes {codes}, {boss.said.count('all ranks start again')}"
    )
    assert boss.summary()["weights_sha256"] == weights, (cuts, codes)


def test_ctrl_c_at_the_supervisor_saves_everywhere_and_leaves_no_agent(start, lab, storage):
    put_job(storage, STEPS, SLOW)
    run = storage / "checkpoints" / "stopped"
    boss = start(
        "login",
        *["train", "/mnt/shared/steady.toml", "--hosts", "10.0.1.10,10.0.1.11", "--json"],
        *["--run-dir", "/mnt/shared/checkpoints/stopped", "--set", f"cluster.ssh=ssh -F {lab.ssh_config}"],
    )
    go_on(run, 10, boss, storage)
    assert processes_on(lab, "node1") > 3
    boss.agent().send_signal(signal.SIGINT)
    assert boss.process.wait(240) == 75, boss.said
    assert "stopped and saved" in boss.said
    assert any((run / "checkpoints").iterdir())
    wait_until(
        lambda: all(place.processes <= 3 for place in lab.status() if place.name != "login"),
        "the end of the agents",
    )


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
    with socket.socket() as taken:  # nobody listens here, and nobody else can
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        ended = train(
            job, tmp_path / "run", "--nodes", 2, "--node-rank", 1, "--leader", f"127.0.0.1:{port}",
            "--set", "cluster.join_seconds=2", "--team-key", a_key(tmp_path),
        )  # fmt: skip
    assert ended.code == 1
    assert f"timed out after 2 s connecting to the leader at 127.0.0.1:{port}" in ended.err
    assert "dure doctor" in ended.err


def test_a_second_node_that_never_comes_is_named_by_the_leader(storage, tmp_path):
    job = put_job(storage, STEPS)
    (free,) = free_ports(1)
    ended = train(
        job, tmp_path / "run", "--nodes", 2, "--node-rank", 0, "--leader", f"127.0.0.1:{free}",
        "--set", "cluster.join_seconds=3", "--team-key", a_key(tmp_path),
    )  # fmt: skip
    assert ended.code == 1
    assert "for node 1 of 2" in ended.err


@pytest.mark.soak
def test_a_node_whose_rank_computes_wrongly_is_left_out_and_the_rest_goes_on_with_the_same_bits(
    start, storage, tmp_path
):
    weights = train_alone(corrupting.put_job(tmp_path, "stop", 0.0, -1), tmp_path / "run").weights_sha256
    corrupting.put_job(storage, "exclude", flips=3)
    words = [
        "/mnt/shared/job.toml" if word == "/mnt/shared/steady.toml" else word
        for word in by_hand(0, "wrong", "--ranks", "2", nodes="1:2")
    ]
    second = start(
        "node1", *("1" if before == "--node-rank" else word for before, word in pairwise(["", *words]))
    )
    first = start("node0", *words)
    summary = first.summary()
    assert (storage / "checkpoints/flipped").exists()
    assert (summary["weights_sha256"], summary["ranks"]) == (weights, 2)
    assert "node 1 (" in first.said
    assert "is excluded: rank 3 on " in first.said
    assert second.process.wait(120) == 3
    assert "computes wrongly" in second.said
