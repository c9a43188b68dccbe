"""A rank killed in the middle of a reduce: the others know it by name within seconds, nothing is left."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from support.leftovers import no_new_shared_memory, shared_memory

from dure.base.errors import RankFailed
from dure.base.run_folder import RunFolder
from dure.launch import run_team


def kill_one_at_random(seed, tmp_path):
    """Kill one of four ranks at a random moment; returns who, and what each survivor was told how late."""
    dice = random.Random(seed)
    victim = dice.randrange(4)
    killed = {}

    def killer():
        deadline = time.monotonic() + 300
        while not all((tmp_path / f"ready-{rank}").exists() for rank in range(4)):
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)
        time.sleep(dice.uniform(0.0, 0.3))
        killed["at"] = time.monotonic()
        os.kill(int((tmp_path / f"pid-{victim}").read_text()), signal.SIGKILL)

    thread = threading.Thread(target=killer)
    thread.start()
    with pytest.raises(RankFailed) as failed:
        run_team(
            "support.reduces:reduce_for_ever",
            (str(tmp_path),),
            ranks=4,
            folder=RunFolder(tmp_path / "run"),
            hang_seconds=300,
            grace_seconds=60.0,  # let the survivors find out by themselves; they end then
        )
    thread.join()
    assert failed.value.rank == victim
    return (
        victim,
        {
            rank: Path(tmp_path, f"told-{rank}").read_text().split(" ", 1)
            for rank in range(4)
            if rank != victim and (tmp_path / f"told-{rank}").exists()
        },
        killed["at"],
    )


def check(seed, tmp_path):
    before = shared_memory()
    victim, told, killed_at = kill_one_at_random(seed, tmp_path)
    assert len(told) == 3, "all survivors notice before they are ended"
    for at, words in told.values():
        assert f"lost rank {victim}" in words
        assert float(at) - killed_at < 30.0
    no_new_shared_memory(before)
    return {rank: float(at) - killed_at for rank, (at, _) in told.items()}


@pytest.mark.parametrize("seed", range(2))
def test_a_rank_killed_in_a_reduce_is_named_by_the_others(seed, tmp_path):
    print(check(seed, tmp_path))


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_fifty_kills_at_random_moments(tmp_path):
    for seed in range(2, 52):
        folder = tmp_path / str(seed)
        folder.mkdir()
        print(seed, check(seed, folder))
