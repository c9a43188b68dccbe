"""Strangers on the network, and on the nodes themselves, while two nodes train: it trains on, to the same bits."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import FOLDER
from support.alone import train_alone
from support.nodes_stories import Started, furthest_step, put_job, restarts, set_pace, wait_for_step

from dure.tools.lab import Lab, why_not_here
from dure.tools.lab.remote import why_no_ssh

REASON = why_not_here() or why_no_ssh()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"lab: {REASON}")
STEPS = 200
SHARED = "/mnt/shared/checkpoints"
DOCTORS_PORT = 29411


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def lab(storage):
    with Lab(f"strangers-{os.getpid()}", storage=storage) as made:
        yield made


@pytest.fixture(scope="module")
def weights(storage, tmp_path_factory):
    """The job's weights after all its steps, trained on one rank, undisturbed."""
    return train_alone(put_job(storage, STEPS), tmp_path_factory.mktemp("alone") / "run").weights_sha256


class Stranger:
    """One of them, at work in a place of the lab."""

    def __init__(self, lab, place, where, port, seed, count, bomb, *key):
        self.process = subprocess.Popen(
            lab.command(
                place,
                [
                    sys.executable,
                    str(FOLDER / "stranger.py"),
                    *map(str, (where, port, seed, count, bomb, *key)),
                ],
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(FOLDER.parent)},
        )

    def done(self):
        out, _ = self.process.communicate(timeout=2500)
        assert self.process.returncode == 0
        return json.loads(out)

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=60)


def shown_by_processes(secret):
    """Where the arguments or variables of a process of this machine, the lab's too, show a secret."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        for place in ("cmdline", "environ"):
            with contextlib.suppress(OSError):
                if secret in (process / place).read_bytes():
                    found.append(process / place)
    return found


def doctor_looks(lab):
    """What the doctor finds of each kind, while a stranger is at its port too: "good", unless something is bad."""
    command = [sys.executable, "-m", "dure", "doctor", "/mnt/shared/steady.toml", "--hosts", "node0,node1"]
    done = subprocess.run(
        lab.command("login", [*command, "--port", str(DOCTORS_PORT), "--json"]),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        cwd="/",
    )
    assert done.stdout, done.stderr
    levels = {}
    for finding in json.loads(done.stdout)["findings"]:
        levels.setdefault(finding["check"], set()).add(finding["level"])
    return {check: "good" if "bad" not in found else sorted(found) for check, found in levels.items()}


def attack(lab, storage, weights, folder, name, count, pace):
    """Train on two nodes, with strangers from before the start until they have tried `count` sequences.

    `pace` is how many seconds a rank takes for each sample, so that the run lasts as long as they do.
    """
    put_job(storage, STEPS, pace)
    run, bomb, key = storage / "checkpoints" / name, f"{SHARED}/pwned-{name}", f"{SHARED}/{name}.key"
    options = [
        "--nodes",
        2,
        "--leader",
        "10.0.1.10:29400",
        "--run-dir",
        f"{SHARED}/{name}",
        "--team-key",
        key,
    ]
    # A machine that is busy with something else for some seconds is not what is tried here.
    options += ["--set", "cluster.lost_seconds=60"]
    first_seed = count * 1000
    started = []
    try:
        # On the nodes: every port of dure's own that opens, the leader's and links'. From outside: the leader's.
        started += [
            Stranger(lab, f"node{n}", f"10.0.1.{10 + n}", 0, first_seed + n, count // 4, bomb) for n in (0, 1)
        ]
        started.append(Stranger(lab, "login", "10.0.1.10", 29400, first_seed + 2, count // 4, bomb))
        first, second = (
            Started(
                lab,
                f"node{n}",
                ["train", "/mnt/shared/steady.toml", "--json", "--node-rank", n, *options],
                folder,
            )
            for n in (0, 1)
        )
        started += [first, second]
        wait_for_step(run, 2, first)
        insider = Stranger(lab, "login", "10.0.1.10", 29400, first_seed + 3, count // 4, bomb, key)
        started.append(insider)
        wait_for_step(run, 6, first)
        # With as few as one, it goes on until there is enough: the doctor's port opens only while the doctor looks.
        of_doctor = Stranger(lab, "login", "10.0.1.11", DOCTORS_PORT, first_seed + 4, 1, bomb)
        started.append(of_doctor)
        looked = [doctor_looks(lab) for _ in range(1 + count // 4000)]
        secret = (storage / "checkpoints" / f"{name}.key").read_bytes().strip()
        assert shown_by_processes(secret) == []
        (storage / "checkpoints" / f"pwned-{name}.enough").touch()
        told = [stranger.done() for stranger in (*started[:3], insider, of_doctor)]
        at = furthest_step(run)
        wait_for_step(run, at + 2, first)
        set_pace(storage, 0.0)
        assert first.summary()["weights_sha256"] == weights
        assert second.process.wait(240) == 0, second.said
    finally:
        for one in started:
            one.end()
    assert at < STEPS - 2, "the strangers were at work while it trained"
    assert restarts(run) == 0, first.said
    assert not (storage / "checkpoints" / f"pwned-{name}").exists()
    assert sum(one["tried"] for one in told[:-1]) >= count // 4 * 4
    assert told[2]["learned"] <= 32, "a nonce, and never a fact"
    assert told[0]["ports"] > 0, "the leader's at least"
    assert told[-1]["tried"] > 0, "the doctor's port, while the doctor looked"
    assert told[-1]["learned"] <= 32, "a nonce, and never a fact"
    assert all(found["network"] == "good" for found in looked), looked
    assert told[0]["silent"] > 1, "the store's and Gloo's are knocked at"
    assert "without the team's key were closed" in first.said
    assert not [path for path in run.rglob("*") if path.is_file() and secret in path.read_bytes()]
    assert secret.decode() not in first.said + second.said


def test_strangers_neither_get_in_nor_learn_anything_nor_disturb_a_run(lab, storage, weights, tmp_path):
    attack(lab, storage, weights, tmp_path, "few", 400, 0.12)


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_20_000_sequences_of_strangers_do_not_disturb_a_run(lab, storage, weights, tmp_path):
    attack(lab, storage, weights, tmp_path, "many", 20_000, 1.5)
