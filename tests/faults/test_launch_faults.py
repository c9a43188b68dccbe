"""Whoever is killed, stopped or hung: it is told at once, and nothing is left behind."""

import os
import re
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest
from support.leftovers import all_gone, no_new_shared_memory, shared_memory, wait_until

from dure.base.errors import RankFailed
from dure.base.run_folder import RunFolder
from dure.launch import run_team

LAUNCHER = textwrap.dedent("""
    import sys
    from pathlib import Path
    from dure.base.errors import DureError
    from dure.launch import run_team
    from dure.base.run_folder import RunFolder
    folder, ranks, options = Path(sys.argv[1]), int(sys.argv[2]), eval(sys.argv[3])
    try:
        run_team("support.entries:wait", (folder, options), ranks=ranks, folder=RunFolder(folder / "run"),
                 hang_seconds=300, preload=())
    except DureError as error:
        print(f"{type(error).__name__}: {error}")
        sys.exit(error.exit_code)
""")


def appear(path):
    """The number in a file, as soon as it is there and written."""
    return int(wait_until(lambda: path.exists() and path.read_text(), f"{path} to appear", 300))


@pytest.fixture
def team(tmp_path):
    """Start a launcher in a process of its own; give it, its ranks' pids and those of all its descendants."""
    shared = shared_memory()
    started = []

    def start(ranks=2, **options):
        path = os.pathsep.join(sys.path)
        launcher = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(tmp_path), str(ranks), repr(options)],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        pids = [appear(tmp_path / f"rank-{rank}") for rank in range(ranks)]
        if options.get("child"):
            pids += [appear(tmp_path / f"child-{rank}") for rank in range(ranks)]
        descendants = [child.pid for child in psutil.Process(launcher.pid).children(recursive=True)]
        assert set(pids) <= set(descendants)
        started.append((launcher, descendants))
        return launcher, pids, descendants

    yield start
    for launcher, descendants in started:
        try:
            all_gone([launcher.pid, *descendants])
        finally:
            launcher.kill()
            launcher.communicate(timeout=300)
    no_new_shared_memory(shared)


def end_of(launcher):
    """What it said, when it has ended: at once, which on a busy machine may take some seconds."""
    return launcher.communicate(timeout=40)[0]


def test_a_killed_store_is_the_cause_and_the_ranks_end(team):
    launcher, _, descendants = team(ranks=2)
    [store] = [pid for pid in descendants if psutil.Process(pid).name() == "dure store"]
    os.kill(store, signal.SIGKILL)
    output = end_of(launcher)
    assert launcher.returncode == 1
    assert "RankFailed: the process in which ranks find each other (dure store)" in output
    assert "was killed by SIGKILL" in output
    all_gone(descendants)


def test_a_killed_rank_is_the_cause_and_the_others_end(team):
    launcher, pids, descendants = team(ranks=3, child=True)
    os.kill(pids[1], signal.SIGKILL)
    output = end_of(launcher)
    assert launcher.returncode == 1
    assert "RankFailed: rank 1 on" in output
    assert "killed by SIGKILL: out of memory, or someone's kill -9" in output
    all_gone(descendants)  # the children of the ranks too


def test_a_killed_launcher_takes_everything_with_it(team):
    launcher, _, descendants = team(child=True, ignore_sigterm=True)
    launcher.kill()
    all_gone(descendants)


def test_a_launcher_killed_while_torch_is_imported_leaves_nothing(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import os, time\nopen('importing', 'w').write(str(os.getpid()))\ntime.sleep(600)"
    )
    code = (
        "from pathlib import Path; from dure.launch import run_team; from dure.base.run_folder import RunFolder\n"
        "run_team('slow:run', (), ranks=2, folder=RunFolder(Path('run')), hang_seconds=300, preload=())"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    launcher = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path
    )
    server = appear(tmp_path / "importing")
    launcher.kill()
    launcher.wait(40)
    all_gone([server])


def test_a_killed_prefork_server_takes_the_ranks_with_it_and_is_told(team):
    launcher, pids, _ = team()
    psutil.Process(pids[0]).parent().kill()
    output = end_of(launcher)
    assert launcher.returncode == 1
    assert "the process that ranks are forked from" in output
    assert "SIGKILL" in output


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stop_signals_end_all_at_once_even_ranks_that_ignore_sigterm_or_are_stopped(team, number, code):
    launcher, pids, descendants = team(ranks=3, ignore_sigterm=True)
    os.kill(pids[2], signal.SIGSTOP)
    launcher.send_signal(number)
    launcher.send_signal(number)  # an impatient user
    output = end_of(launcher)
    assert launcher.returncode == code
    assert re.search("StoppedAtOnce: stopped (at once )?by", output)  # the second may come when all is over
    all_gone(descendants)


def test_ctrl_c_while_torch_is_imported_stops_at_once(tmp_path):
    (tmp_path / "torch.py").write_text(
        "import os, time\nopen('importing', 'w').write(str(os.getpid()))\ntime.sleep(600)"
    )
    code = (
        "from pathlib import Path; from dure.launch import run_team; from dure.base.run_folder import RunFolder\n"
        "from dure.base.errors import StoppedAtOnce\n"
        "folder = RunFolder(Path('run'))\n"
        "try: run_team('os:getpid', (), ranks=2, folder=folder, hang_seconds=300, preload=('torch',))\n"
        "except StoppedAtOnce as stopped: raise SystemExit(stopped.exit_code)"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    launcher = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path
    )
    importing = appear(tmp_path / "importing")
    server = [child.pid for child in psutil.Process(launcher.pid).children()]
    assert server == [importing]
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(40) == 130
    all_gone(server)


def test_a_stopped_rank_is_named_with_who_waits_for_it_and_all_stacks_are_kept(tmp_path):
    folder = RunFolder(tmp_path / "run")
    notes = [tmp_path / f"rank-{rank}" for rank in range(3)]
    stopped = []

    def stop_the_last():
        if not stopped and all(note.exists() for note in notes):
            stopped.append(int(notes[2].read_text()))
            os.kill(stopped[0], signal.SIGSTOP)

    with pytest.raises(RankFailed) as failure:
        run_team(
            "support.entries:step_until_stopped",
            (tmp_path, folder),
            ranks=3,
            folder=folder,
            hang_seconds=4,
            on_tick=stop_the_last,
            preload=(),
        )
    assert stopped
    message = str(failure.value)
    assert failure.value.rank == 2
    assert message.startswith("rank 2 has been in COMPUTE of step 3 for ")
    assert "(stopped); ranks 0, 1 wait for it in the exchange of step 3." in message
    assert message.endswith(f"Stacks: {folder.path}/stacks/")
    for rank in (0, 1):
        assert "in wait_here" in folder.stacks(rank).read_text()
    silent = folder.stacks(2).read_text()
    assert "gave no stacks: stopped" in silent
    assert "COMPUTE of step 3" in silent
    assert "State:\tT (stopped)" in silent
    all_gone([int(note.read_text()) for note in notes])


def test_a_rank_that_computes_for_ever_is_named_with_its_stack(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(RankFailed, match="rank 1 has been in COMPUTE of step 3") as failure:
        run_team(
            "support.entries:step_until_stopped",
            (tmp_path, folder),
            ranks=2,
            folder=folder,
            hang_seconds=4,
            preload=(),
        )
    assert "in wait_here" in failure.value.details


def test_a_rank_that_never_gets_going_is_noticed(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(RankFailed, match=r"ranks? 0 has been in STARTING of step 0 for .* s \(sleeping\)"):
        run_team("support.entries:wait_here", (), ranks=1, folder=folder, hang_seconds=1, preload=())
