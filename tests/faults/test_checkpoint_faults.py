"""Whatever happens to a checkpoint or to its storage: it is found, told, and the one before is used."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from support.checkpoints import ALONE, SmallRun, newest

from dure.base.errors import CheckpointError, UsageError
from dure.checkpoint.find import entries, newest_state, refuse_other_recipe
from dure.storage import open_store


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path)


@pytest.fixture
def saved(store, tmp_path):
    """Two checkpoints; gives the folder of the newest."""
    run = SmallRun(store)
    assert run.save(1).trouble is None
    name = run.save(2).name
    assert newest(store) == (2, [])
    return tmp_path / name


def test_one_flipped_bit_in_any_file_of_the_newest_is_found_and_the_one_before_used(store, saved):
    dice = random.Random(5)
    for file in sorted(saved.iterdir()):
        content = file.read_bytes()
        places = [0, 7, 8, len(content) - 1, *(dice.randrange(len(content)) for _ in range(40))]
        for at in places:
            broken = bytearray(content)
            broken[at] ^= 1 << dice.randrange(8)
            file.write_bytes(broken)
            step, told = newest(store)
            assert step == 1, f"byte {at} of {file.name}"
            assert saved.name in told[0]
            assert newest(store) == (1, []), "what was set aside is told once"
            (saved / "broken.json").unlink()
        file.write_bytes(content)
    assert newest(store) == (2, [])


def test_a_truncated_file_and_a_missing_one_are_told(store, saved):
    part = next(saved.glob("part-*"))
    os.truncate(part, part.stat().st_size - 1)
    step, told = newest(store)
    assert step == 1
    assert "bytes instead of" in told[0]
    (saved / "broken.json").unlink()
    part.unlink()
    step, told = newest(store)
    assert step == 1
    assert f"{part.name} is missing" in told[0]


def test_a_checkpoint_that_was_never_finished_is_not_one(store, saved):
    (saved / "manifest.json").unlink()
    step, told = newest(store)
    assert step == 1
    assert "never finished" in told[0]


def test_a_newer_format_is_refused_and_not_set_aside(store, saved):
    manifest = saved / "manifest.json"
    told = json.loads(manifest.read_text())
    told["facts"]["format"] = 99
    manifest.write_text(json.dumps(told))
    with pytest.raises(CheckpointError, match=r"format 99.*newer dure"):
        newest(store)
    assert not (saved / "broken.json").exists()


def test_another_jobs_checkpoint_is_refused_by_what_differs(store, tmp_path):
    run = SmallRun(store)
    run.save(1, recipe_words={"job": {"train": {"lr": 0.1, "seed": 1}}, "torch": "2.13"})
    now = {"job": {"train": {"lr": 0.2, "seed": 1}}, "torch": "2.13"}
    with pytest.raises(UsageError, match=r"another recipe: train.lr was 0.1 and is 0.2; .*--fresh"):
        newest(store, lambda manifest: refuse_other_recipe(manifest.facts, now, store.location))


def test_when_all_are_broken_the_run_does_not_silently_start_from_nothing(store, tmp_path):
    SmallRun(store).save(1)
    next(tmp_path.glob("step-*/part-*")).unlink()
    with pytest.raises(CheckpointError, match="--fresh"):
        newest(store)


def test_a_long_read_shows_that_it_is_alive(store, saved):
    beats = []
    assert (
        newest_state(store, ALONE, ALONE, lambda manifest: None, print, lambda: beats.append(1)) is not None
    )
    assert beats, "a hang watch would end a run that reads a large checkpoint"


def test_a_fresh_run_is_newer_than_an_older_one_that_came_further(store):
    SmallRun(store, line="2026-01-01").save(900)
    SmallRun(store, line="2026-01-02", keep=1).save(3)
    assert newest(store)[0] == 3
    assert len(entries(store)) == 2, "retention leaves another run's checkpoints alone"


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own of 1 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", place]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no rights to mount a small file system here")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_storage_that_fills_up_costs_one_checkpoint_and_nothing_before_it(small_disk):
    store = open_store(small_disk)
    run = SmallRun(store, rows=2000)
    assert run.save(1).trouble is None
    filler = small_disk / "filler"
    filler.write_bytes(bytes(600_000))
    outcome = run.save(2)
    assert outcome.name is None
    assert "full" in outcome.trouble
    assert newest(store) == (1, [])
    assert [path.name for path in small_disk.iterdir() if path.name.startswith("saving-")] == []
    filler.unlink()
    assert run.save(3).trouble is None
    assert newest(store) == (3, [])


def test_storage_that_becomes_read_only_and_writable_again(small_disk):
    store = open_store(small_disk)
    run = SmallRun(store)
    assert run.save(1).trouble is None
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert "read-only" in run.save(2).trouble
    assert newest(store) == (1, [])
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    assert run.save(3).trouble is None
    assert newest(store) == (3, [])


SAVING = """
import os, sys, time
sys.path[:0] = {path!r}
from support.checkpoints import ALONE, SmallRun, newest
from dure.storage import open_store
store = open_store({folder!r})
SmallRun(store)  # what torch imports for its first optimizer, once for all children
while sys.stdin.readline():
    child = os.fork()
    if child == 0:
        run, (step, told) = SmallRun(store, rows=9000), newest(store)
        print(os.getpid(), step or 0, len(told), flush=True)
        for step in range((step or 0) + 1, 10**6):
            assert run.save(step).trouble is None, run.outcomes[-1]
    os.waitpid(child, 0)
    print("ended", flush=True)
"""
"""Forks, for every line it gets, a run that goes on from the newest checkpoint and saves without a pause; its
part is large enough to be written past the page cache."""


def kill_while_saving(folder, kills, seed):
    """Kill runs at random moments, until so many of them have saved something before."""
    dice = random.Random(seed)
    code = SAVING.format(path=sys.path, folder=str(folder))
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    reached, patience_seconds, deadline = -1, 0.12, time.monotonic() + 60 * kills
    try:
        while kills > 0:
            parent.stdin.write("go\n")
            parent.stdin.flush()
            pid, step, told = map(int, parent.stdout.readline().split())
            assert step >= max(reached, 0), "a finished checkpoint was lost"
            assert told == 0, "a kill must not leave what looks like a damaged checkpoint"
            time.sleep(dice.uniform(0.0, patience_seconds))
            os.kill(pid, signal.SIGKILL)
            assert parent.stdout.readline() == "ended\n"
            before, (reached, told) = reached, newest(open_store(folder))
            reached = -1 if reached is None else reached
            assert told == []
            if reached > before:
                kills -= 1
            else:  # nothing was saved since the last kill; a slow disk may need longer
                patience_seconds *= 1.2
                assert time.monotonic() < deadline, "the runs must save something between the kills"
    finally:
        parent.stdin.close()
        parent.wait(60)
        parent.stdout.close()


def test_10_kills_while_saving_never_lose_or_half_load_a_checkpoint(tmp_path):
    kill_while_saving(tmp_path, 10, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_190_kills_while_saving_never_lose_or_half_load_a_checkpoint(tmp_path):
    kill_while_saving(tmp_path, 190, seed=2)
