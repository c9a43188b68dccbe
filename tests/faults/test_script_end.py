"""How scripts end under `dure run`: by themselves, by a signal, by another rank's failure. Nobody is cut off."""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
from support import FOLDER
from support.leftovers import all_gone, wait_until

SAMPLE = FOLDER / "cpu_ddp.py"
HANGS_SECONDS = 300


def start(*command, **options):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen(
        [sys.executable, "-m", "dure", "run", *map(str, command)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        **options,
    )


def ends_well(process, ranks):
    """Wait for a run; one that hangs is ended, and named."""
    try:
        out, err = process.communicate(timeout=HANGS_SECONDS)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGQUIT)
        out, err = process.communicate(timeout=HANGS_SECONDS)
        pytest.fail(f"it hung: {out}{err}")
    assert process.returncode == 0, err
    for rank in range(ranks):
        assert f"rank {rank} is done" in out
    return out


def test_models_that_outlive_their_process_groups_hang_nobody_and_no_thread_is_left(tmp_path):
    """Each of the ten groups, and the last one, had one chance in three to hang one of four ranks."""
    out = ends_well(start("--ranks", 4, "--run-dir", tmp_path / "run", SAMPLE, "destroy", 10), 4)
    for threads in re.findall(r"threads (\d+)", out):
        assert int(threads) < 12  # a group has two or three; the last one's may still be there


def test_a_script_that_destroys_nothing_ends(tmp_path):
    started = [start("--ranks", 4, "--run-dir", tmp_path / str(n), SAMPLE, "leave", 0) for n in range(2)]
    for process in started:
        ends_well(process, 4)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("end", ["leave", "destroy"])
def test_a_ddp_script_ends_two_hundred_times(tmp_path, end):
    for number in range(200):
        ends_well(start("--ranks", 4, "--run-dir", tmp_path / str(number), SAMPLE, end, 0), 4)


SAVER = """
import atexit, os, signal, sys, time
folder, how, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
rank = os.environ["RANK"]

def save(*_):
    with open(os.path.join(folder, f".{rank}"), "w") as file:
        time.sleep(seconds)
        file.write("all of it")
    os.rename(os.path.join(folder, f".{rank}"), os.path.join(folder, f"saved-{rank}"))

def save_and_leave(*_):
    save()
    sys.exit(0)

signal.signal(signal.SIGTERM, save_and_leave)
open(os.path.join(folder, f"up-{rank}"), "w").close()
if how == "raise" and rank == "1":
    while not os.path.exists(os.path.join(folder, "up-0")):
        time.sleep(0.01)
    atexit.register(save)
    raise ValueError("as asked")
try:
    if how == "spin":
        while True:
            pass
    time.sleep(600)
except KeyboardInterrupt:
    save()
"""


@pytest.fixture
def saver(tmp_path):
    """Start the script above; gives the launcher when all ranks are up. Whatever happens, nothing is left."""
    script = tmp_path / "saver.py"
    script.write_text(SAVER)
    started = []

    def begin(*options, how="wait", seconds=4.0, **arguments):
        process = start("--run-dir", tmp_path / "run", *options, script, tmp_path, how, seconds, **arguments)
        wait_until(lambda: all((tmp_path / f"up-{rank}").exists() for rank in range(2)), "ranks", 300)
        started.append((process, psutil.Process(process.pid).children(recursive=True)))
        return process

    yield begin
    for process, descendants in started:
        try:
            all_gone([process.pid, *descendants])
        finally:
            process.kill()
            process.communicate(timeout=300)


def saved(folder):
    return [path.read_text() for path in sorted(folder.glob("saved-*"))]


@pytest.mark.parametrize(
    ("number", "how", "seconds"),
    [(signal.SIGTERM, "spin", 10.0), (signal.SIGINT, "wait", 10.0), (signal.SIGHUP, "wait", 1.0)],
)
def test_a_script_that_saves_when_it_is_stopped_keeps_its_file(saver, tmp_path, number, how, seconds):
    process = saver(how=how, seconds=seconds)
    process.send_signal(number)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 128 + number
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    assert f"dure: {name}: waits up to 30 s for rank(s) 0, 1 to end; once more ends them at once" in err
    assert f"dure: stopped by {name}; all ranks are ended." in err
    assert saved(tmp_path) == ["all of it"] * 2


def test_the_exit_hooks_of_a_rank_that_raised_come_to_their_end_while_the_others_save(saver, tmp_path):
    process = saver(how="raise", seconds=5.0)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "failed: ValueError: as asked" in err.splitlines()[-1]
    assert saved(tmp_path) == ["all of it"] * 2


def test_the_grace_can_be_chosen_and_those_that_exceed_it_are_named(saver, tmp_path):
    process = saver("--grace", 1, seconds=600.0)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 143
    assert "rank(s) 0, 1 did not end, and were killed" in err
    assert saved(tmp_path) == []


def test_a_second_signal_ends_the_grace_but_a_second_hang_up_does_not(saver, tmp_path):
    process = saver(seconds=600.0)
    process.send_signal(signal.SIGHUP)
    wait_until(lambda: all((tmp_path / f".{rank}").exists() for rank in range(2)), "ranks that save", 300)
    process.send_signal(signal.SIGHUP)
    time.sleep(1.0)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "rank(s) 0, 1 did not end, and were killed" in err


def test_a_signal_for_somebody_else_ends_neither_the_launcher_nor_the_prefork_server(saver, tmp_path):
    process = saver(seconds=0.0)
    (server,) = psutil.Process(process.pid).children()
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        process.send_signal(number)
        server.send_signal(number)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        server.send_signal(number)
    time.sleep(0.5)
    assert process.poll() is None
    assert server.is_running()
    assert len(server.children()) == 3  # the store, and two ranks
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert process.returncode == 143
    assert saved(tmp_path) == ["all of it"] * 2


STAYS = """
import atexit, os, sys, time

def stays():
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.05)

if os.environ["RANK"] == "1":
    atexit.register(stays)
"""
PATIENT = """
import sys
from pathlib import Path
from dure.launch import LaunchSpec, run_script
from dure.launch import exit_watch as leaving
from dure.base.run_folder import RunFolder
leaving.AFTER_SECONDS = (2.0,)
spec = LaunchSpec(ranks=3, folder=RunFolder(Path(sys.argv[3])), grace_seconds=30.0)
sys.exit(run_script(sys.argv[1], [sys.argv[2]], spec, module=False, cold=sys.argv[4] == "cold"))
"""


@pytest.mark.parametrize(("kind", "stack"), [("warm", "in stays"), ("cold", "gives no stacks")])
def test_a_rank_that_does_not_end_after_the_others_is_named_with_its_stack(tmp_path, kind, stack):
    script, go = tmp_path / "stays.py", tmp_path / "go"
    script.write_text(STAYS)
    with (tmp_path / "err").open("w") as err:
        process = subprocess.Popen(
            [sys.executable, "-c", PATIENT, script, go, tmp_path / "run", kind],
            stderr=err,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    said = wait_until(lambda: re.search(f"{stack}", (tmp_path / "err").read_text()), "a word", 300)
    assert said
    assert re.search(r"dure: rank 1 has not ended \d+ s after the others\n", (tmp_path / "err").read_text())
    go.touch()
    assert process.wait(300) == 0
