"""The preflight, on real nodes of the lab: each thing that is made wrong is found, and named with its node."""

import importlib.util
import json
import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.commands import dure
from support.doctor_looks import JOB, failed
from support.leftovers import wait_until

from dure.tools.lab import Lab, why_not_here

REASON = why_not_here()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"lab: {REASON}")
TORCH_VERSION = Path(importlib.util.find_spec("torch").origin).with_name("version.py")


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    storage = tmp_path_factory.mktemp("storage")
    (storage / "job.toml").write_text(JOB)
    (storage / "ddp.py").write_text("def model(): ...\n\n\ndef data(folder): ...\n")
    (storage / "training_data").mkdir()
    (storage / "training_data" / "0.png").write_bytes(b"photo")
    with Lab(f"doctor-{os.getpid()}", rate="10gbit", storage=storage) as made:
        yield made


def run(lab, place, *command):
    return subprocess.run(
        lab.command(place, command), capture_output=True, text=True, timeout=300, check=False, cwd="/"
    )


def inject(lab, node, script):
    done = run(lab, node, "sh", "-ec", script)
    assert done.returncode == 0, done.stderr


@contextmanager
def wrong(lab, node, script, undo):
    """Within this, something is wrong on a node."""
    inject(lab, node, script)
    try:
        yield
    finally:
        nobody_is_left(lab, node)  # who would keep what is to be taken away busy
        inject(lab, node, undo)


def doctor(lab, *options, place="login"):
    """What the doctor finds: its exit code, and its object."""
    command = (sys.executable, "-m", "dure", "doctor", "/mnt/shared/job.toml", "--hosts", "node0,node1")
    done = run(lab, place, *command, "--json", *options)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] is (done.returncode == 0)
    assert done.returncode in (0, 4), done.stderr
    return found, done.stderr


def nobody_is_left(lab, node):
    """The doctor's part on a node has ended; over ssh, that is a moment after it is hung up on."""
    wait_until(lambda: "doctor --serve" not in run(lab, node, "ps", "-e", "-o", "args").stdout)


def nothing_is_left(lab):
    """No mark is left in the storage."""
    wait_until(lambda: run(lab, "node0", "ls", "-A", "/mnt/shared/checkpoints").stdout == "")


def over(path, content):
    """Lay another file over one, on one node alone; and take it away."""
    lay = f"other=$(mktemp); printf {content!r} >$other; chmod 644 $other; mount --bind $other {path}"
    return f"{lay}; mount -o remount,bind,ro {path}", f"umount {path}"


INJECTED = {
    "another torch version": (
        over(TORCH_VERSION, '__version__ = "2.12.1"'),
        {("versions", "node1")},
        "torch 2.12.1; the others have torch",
    ),
    "storage not mounted": (
        ("mount -t tmpfs -o mode=755 none /mnt/shared", "umount /mnt/shared"),
        {
            ("storage", "node1"),
            ("read_only", "node1"),
            ("read_write", "node1"),
            ("digests", "node1"),
            ("both_ways", "node1"),
        },
        "findmnt -T /mnt/shared",
    ),
    "read-only mount writable": (
        ("mount -o remount,bind,rw /mnt/shared", "mount -o remount,bind,ro /mnt/shared"),
        {("read_only", "node1")},
        "can be written: /mnt/shared, /mnt/shared/ddp.py, /mnt/shared/training_data",
    ),
    "checkpoints read-only": (
        (
            "mount -o remount,bind,ro /mnt/shared/checkpoints",
            "mount -o remount,bind,rw /mnt/shared/checkpoints",
        ),
        {("read_write", "node1")},
        "/mnt/shared/checkpoints is read-only",
    ),
    "wrong interface": (
        (
            "ip link set eth0 down; ip link set eth0 name ens5; ip link set ens5 up",
            "ip link set ens5 down; ip link set ens5 name eth0; ip link set eth0 up",
        ),
        {("interface", "node1")},
        "there is no eth0 here; there is ens5 (10.0.1.11), lo (127.0.0.1)",
    ),
    "firewalled port": (
        (
            "nft add table inet wall; nft 'add chain inet wall in { type filter hook input priority 0; }';"
            "nft add rule inet wall in tcp dport 29400 drop",
            "nft delete table inet wall",
        ),
        {("network", "node1")},
        "node0 → node1 port 29400: timed out",
    ),
    "host name resolving to 127.x": (
        over("/etc/hosts", "127.0.0.1 localhost\n127.0.1.1 node1\n10.0.1.10 node0\n"),
        {("name", "node1")},
        "node1 is 127.0.1.1, which only this node can reach",
    ),
    "/dev/shm of 64 MB": (
        ("mount -o remount,size=64m /dev/shm", "mount -o remount,size=50% /dev/shm"),
        {("shm", "node1")},
        "64.0 MiB; 256.0 MiB may be needed",
    ),
    "a different script digest": (
        over("/mnt/shared/ddp.py", "def model(): return 2\n"),
        {("digests", "node1")},
        "other bytes: model.factory (/mnt/shared/ddp.py)",
    ),
    "a full disk": (
        (
            "mount -t tmpfs -o size=64k none /mnt/shared/checkpoints; cat /dev/zero >/mnt/shared/checkpoints/x || true",
            "umount /mnt/shared/checkpoints",
        ),
        {("space", "node1"), ("read_write", "node1"), ("both_ways", "node1")},
        "/mnt/shared/checkpoints is full",
    ),
    "a folder that is not shared": (
        ("mount -t tmpfs none /mnt/shared/checkpoints", "umount /mnt/shared/checkpoints"),
        {("both_ways", "node1")},
        "does not see what node0 wrote",
    ),
}


TOGETHER = [
    [
        "another torch version",
        "firewalled port",
        "host name resolving to 127.x",
        "/dev/shm of 64 MB",
        "a different script digest",
    ],
    ["read-only mount writable", "checkpoints read-only", "wrong interface"],
    ["storage not mounted"],
    ["a full disk"],
    ["a folder that is not shared"],
]
"""What can be wrong at once, so that a few looks find all; `make soak` looks for each alone."""


def test_nodes_as_the_documents_draw_them_pass_and_nothing_is_left(lab):
    found, said = doctor(lab, "--set", "cluster.interface=eth0")
    assert failed(found) == set()
    assert (found["bad_nodes"], said) == ([], "")
    checks = {(finding["check"], finding["node"]) for finding in found["findings"]}
    machine = {"versions", "cpu", "space", "shm", "files", "clock", "cores"}
    files = {"digests", "storage", "both_ways", "read_only", "read_write"}
    expected = machine | files | {"reach", "name", "interface", "network"}
    assert checks == {(check, node) for check in expected for node in ("node0", "node1")}
    assert [(pair["from"], pair["to"]) for pair in found["pairs"]] == [("node0", "node1"), ("node1", "node0")]
    for pair in found["pairs"]:
        assert 0 < pair["seconds"] < 60
        assert 1e3 < pair["bytes_per_second"] < 10e9 / 8 * 1.3  # the cable's rate
    nothing_is_left(lab)
    for node in ("node0", "node1"):
        nobody_is_left(lab, node)


def test_everything_that_can_be_wrong_is_looked_for():
    assert sorted(name for names in TOGETHER for name in names) == sorted(INJECTED)


ALONE = [pytest.param([name], marks=pytest.mark.soak) for names in TOGETHER[:2] for name in names]


@pytest.mark.parametrize("names", [*TOGETHER, *ALONE])
def test_the_doctor_finds_and_names(lab, names):
    with ExitStack() as undone:
        for name in names:
            undone.enter_context(wrong(lab, "node1", *INJECTED[name][0]))
        found, said = doctor(lab, "--set", "cluster.interface=eth0")
    assert failed(found) == set().union(*(INJECTED[name][1] for name in names))
    assert found["bad_nodes"] == ["node1"]
    assert "preflight failed on node1: " in said
    told = [
        f"{finding['value']} {finding['fix']}" for finding in found["findings"] if finding["level"] == "bad"
    ]
    for name in names:
        assert any(INJECTED[name][2] in text for text in told), (name, told)


@pytest.mark.soak
def test_a_node_that_cannot_be_reached_is_named_and_the_others_are_looked_at(lab):
    lab.cut("node1")
    try:
        found, said = doctor(lab)
    finally:
        lab.heal()
    assert failed(found) == {("reach", "node1")}
    assert ("shm", "node0") in {(finding["check"], finding["node"]) for finding in found["findings"]}
    assert "preflight failed on node1: reached" in said


def test_a_person_gets_a_table_with_what_to_do_in_either_language(lab):
    command = (sys.executable, "-m", "dure", "doctor", "/mnt/shared/job.toml", "--hosts", "node0,node1")
    with wrong(lab, "node1", *INJECTED["/dev/shm of 64 MB"][0]):
        korean = run(lab, "node0", *command, "--lang", "ko")  # from a node: itself, and the other over ssh
    assert korean.returncode == 4
    assert "✗ node1" in korean.stdout
    assert "Docker에서는 --shm-size" in " ".join(korean.stdout.split())
    assert "사전 점검 실패, 노드 node1: /dev/shm" in korean.stderr


@pytest.fixture
def with_image(lab, image):
    """The option that has the job run in an image, which is on the storage."""
    name = Path(lab.state.storage, image.name)
    os.link(image, name)
    yield ("--set", f"cluster.image={image.name}")
    name.unlink()


def test_with_an_image_the_doctor_looks_from_inside_it(lab, with_image):
    """The image's own mounts are what is tried: even on a node whose storage could be written."""
    with ExitStack() as undone:
        for name in ("read-only mount writable", "checkpoints read-only"):
            undone.enter_context(wrong(lab, "node1", *INJECTED[name][0]))
        found, _ = doctor(lab, *with_image)
    assert failed(found) == {("read_write", "node1")}
    told = {(one["check"], one["node"]): one["value"] for one in found["findings"]}
    assert told["read_write", "node1"] == "/mnt/shared/checkpoints is read-only"
    assert told["read_only", "node1"] == "/mnt/shared refuses writes"
    assert all("image " in told["digests", node] for node in ("node0", "node1"))
    nothing_is_left(lab)


def test_a_node_that_cannot_go_into_the_image_says_why_and_looks_from_outside(lab, with_image):
    """Whatever is wrong besides is found by its own check, and what only the image has is not compared."""
    missing = ("mount -t tmpfs none /mnt/shared/training_data", "umount /mnt/shared/training_data")
    hidden = over("/mnt/shared/pytorch_squash.sqsh", "no image")
    beside = (INJECTED["another torch version"][0], INJECTED["/dev/shm of 64 MB"][0])
    with ExitStack() as undone:
        for script, undo in (missing, hidden, *beside):
            undone.enter_context(wrong(lab, "node1", script, undo))
        found, said = doctor(lab, *with_image, "--set", 'data.args.folder="{storage}/training_data/0.png"')
    assert failed(found) == {(check, "node1") for check in ("image", "digests", "storage", "shm")}
    assert "preflight failed on node1: image, same files, storage, /dev/shm" in said


def test_on_one_machine_a_stand_in_for_the_run_is_made_and_removed(tmp_path, image):
    storage, work = tmp_path / "storage", tmp_path / "work"
    (storage / "training_data").mkdir(parents=True)
    work.mkdir()
    (storage / "job.toml").write_text(JOB)
    (storage / "ddp.py").write_text("def model(): ...\n\n\ndef data(folder): ...\n")
    (storage / "damaged.sqsh").write_bytes(b"hsqs and nothing else")
    command = ("doctor", storage / "job.toml", "--json", "--set")
    ended = dure(*command, f"cluster.image={image}", cwd=work)
    assert ended.code == 0, ended.out
    told = {one["check"]: one["value"] for one in json.loads(ended.out)["findings"]}
    assert told["read_write"] == f"{work}/runs takes write, fsync and rename"
    assert told["read_only"] == f"{storage} refuses writes"
    ended = dure(*command, "cluster.image=damaged.sqsh", cwd=work)
    assert ended.code == 4
    assert "preflight failed on localhost: image" in ended.err
    assert list(work.iterdir()) == []
