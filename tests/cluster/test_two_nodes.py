"""Two nodes on one machine: two hosts for whoever is on them, and nothing left when they are gone."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from support.leftovers import all_gone, family, no_new_family, wait_until

from dure.base.errors import RankFailed, UsageError
from dure.base.run_folder import RunFolder
from dure.tools.bench.two_nodes import TwoNodes
from dure.tools.lab import why_not_here
from dure.tools.lab.network import bits_per_second

REASON = why_not_here()
needs_nodes = pytest.mark.skipif(REASON is not None, reason=f"two nodes: {REASON}")


def namespaces():
    """The network, mount and host-name namespaces that some process of this machine is in."""
    found = set()
    for pid in psutil.pids():
        for kind in ("net", "mnt", "uts"):
            try:
                found.add(os.readlink(f"/proc/{pid}/ns/{kind}"))
            except OSError:
                continue
    return found


@pytest.fixture
def nothing_is_left(tmp_path):
    """No namespace of ours, no process, no mount, no interface, nothing in /dev/shm is left at the end."""

    def outside():
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        interfaces = [line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()]
        return {*mounts, *interfaces, *Path("/run/netns").glob("*")}

    before, others = outside(), family()
    made = set()
    yield made.update
    # With patience: a network namespace is taken down in the background, and others use this machine too.
    wait_until(lambda: not made & namespaces(), lambda: f"the end of {made & namespaces()}")
    no_new_family(others)
    all_gone(noted_pids(tmp_path))
    # Only what is new: what others had mounted before may be gone since.
    wait_until(lambda: not outside() - before, lambda: f"the end of {outside() - before}")


def noted_pids(folder):
    """The ranks that have said who they are; the nodes count processes as the machine does."""
    return [int(path.read_text()) for path in folder.glob("pid-*")]


def namespaces_of(nodes):
    kinds = ("net", "mnt", "uts")
    read = [f"/proc/self/ns/{kind}" for kind in kinds]
    found = set()
    for node in range(2):
        done = subprocess.run(
            nodes.command(node, ["readlink", *read]), capture_output=True, text=True, timeout=300, check=True
        )
        found |= set(done.stdout.split())
    assert len(found) == 2 * len(kinds)
    return found


@needs_nodes
def test_eight_ranks_on_two_nodes_meet_and_each_node_is_a_host_of_its_own(tmp_path, nothing_is_left):
    with TwoNodes() as nodes:
        nothing_is_left(namespaces_of(nodes))
        before = nodes.byte_counters()
        found = nodes.run_ranks("support.node_tasks:look_around", (), folder=RunFolder(tmp_path / "run"))
        after = nodes.byte_counters()
    for rank, seen in enumerate(found):
        topology, node = seen["world"], rank // 4
        assert (topology.rank, topology.size, topology.local_rank, topology.local_size) == (
            rank,
            8,
            rank % 4,
            4,
        )
        assert (topology.node, topology.nodes, topology.leader_host, topology.launcher) == (
            node,
            2,
            "10.0.1.10",
            "hand",
        )
        assert seen["sum"] == sum(range(8))
        assert seen["host"] == f"node{node}"
        assert seen["resolved"] == ["10.0.1.10", "10.0.1.11"]
        assert seen["shm"] == {"mine": f"node{node}"}
        assert (seen["interface"], seen["threads"]) == ("eth0", 1)
    assert all(more > less for less, more in zip(before, after, strict=True))
    assert not Path("/dev/shm/mine").exists()


@needs_nodes
@pytest.mark.parametrize(
    ("task", "failing", "message", "host"),
    [
        ("raise_on", 5, "rank 5 on node1 failed: ValueError: the cause", "node1"),
        pytest.param(
            *("kill_self_on", 2, "rank 2 on node0 was killed by SIGKILL", "node0"), marks=pytest.mark.soak
        ),
        ("kill_self_on", 7, "rank 7 on node1 was killed by SIGKILL", "node1"),
    ],
)
def test_a_rank_that_fails_ends_all_and_is_named(task, failing, message, host, tmp_path, nothing_is_left):
    with TwoNodes() as nodes:
        nothing_is_left(namespaces_of(nodes))
        with pytest.raises(RankFailed, match=message) as failed:
            nodes.run_ranks(
                f"support.node_tasks:{task}",
                (failing, str(tmp_path)),
                folder=RunFolder(tmp_path / "run"),
                preload=(),
            )
        assert (failed.value.rank, failed.value.host) == (failing, host)
        assert "raise ValueError" in failed.value.details or task != "raise_on"
        assert noted_pids(tmp_path)
        all_gone(noted_pids(tmp_path))


@needs_nodes
def test_ranks_that_never_return_are_named_at_the_deadline(tmp_path, nothing_is_left):
    with TwoNodes() as nodes:
        nothing_is_left(namespaces_of(nodes))
        with pytest.raises(RankFailed, match="0, 1 did not end within 1 s"):
            nodes.run_ranks(
                "support.node_tasks:wait_for_ever",
                (str(tmp_path),),
                ranks_per_node=1,
                folder=RunFolder(tmp_path / "run"),
                deadline_seconds=1,
                preload=(),
            )


@needs_nodes
def test_killing_the_process_that_made_the_nodes_leaves_nothing(tmp_path, nothing_is_left):
    code = f"""
        from pathlib import Path
        from dure.tools.bench.two_nodes import TwoNodes
        from dure.base.run_folder import RunFolder
        with TwoNodes("1gbit") as nodes:
            args, folder = ({str(tmp_path)!r},), RunFolder(Path("run"))
            nodes.run_ranks("support.node_tasks:wait_for_ever", args, folder=folder, preload=())
    """
    path = os.pathsep.join(filter(None, sys.path))
    maker = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}
    )
    try:
        wait_until(lambda: maker.poll() is not None or len(noted_pids(tmp_path)) == 8, "eight ranks", 240)
        assert maker.poll() is None
        started = psutil.Process(maker.pid).children(recursive=True)
        made = {
            os.readlink(f"/proc/{one.pid}/ns/{kind}") for one in started for kind in ("net", "mnt", "uts")
        }
        nothing_is_left(made - {os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "mnt", "uts")})
        assert len(started) >= 12  # two places, two prefork servers, eight ranks
    finally:
        maker.kill()
        maker.wait(60)
    all_gone(started)


@needs_nodes
def test_a_shaped_link_carries_no_more_than_its_rate(tmp_path, nothing_is_left):
    nbytes = 12_500_000
    with TwoNodes("200mbit") as nodes:
        nothing_is_left(namespaces_of(nodes))
        before = nodes.byte_counters()
        folder = RunFolder(tmp_path / "run")
        _, seconds = nodes.run_ranks(
            "support.node_tasks:send_one_way", (nbytes,), ranks_per_node=1, folder=folder, preload=()
        )
        there, back = (after - counted for after, counted in zip(nodes.byte_counters(), before, strict=True))
    assert nbytes / seconds < 200e6 / 8 * 1.3
    assert nbytes <= there < 1.2 * nbytes
    assert back < 0.2 * nbytes


@pytest.mark.parametrize(("rate", "bits"), [("10gbit", 1e10), ("2.5gbit", 2.5e9), ("100mbit", 1e8)])
def test_rates_are_written_as_tc_writes_them(rate, bits):
    assert bits_per_second(rate) == bits


@pytest.mark.parametrize("rate", ["10", "10GB", "fast", "-1gbit", "0gbit"])
def test_a_rate_that_cannot_be_is_refused(rate):
    with pytest.raises(UsageError, match="such as 10gbit"):
        TwoNodes(rate)


def test_a_user_without_root_is_told_why_not(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="take root"), TwoNodes():
        pass
