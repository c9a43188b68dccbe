"""A script under `dure run` finds a process of its own: its numbers, its variables, its terminal, its name."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import psutil
import pytest
from support.commands import dure
from support.leftovers import wait_until

STATES = """
import sys
seen = sorted({"numpy", "torch", "transformers"} & set(sys.modules))
import json, multiprocessing, os, random, secrets, ssl, tempfile, uuid
os.environ["TMPDIR"] = os.path.join(sys.argv[1], "own")
import numpy, sympy.core.random, torch
from sympy.core.symbol import Dummy
drawn = {
    "torch": torch.rand(1, dtype=torch.float64).item(),
    "torch's seed": torch.initial_seed(),
    "numpy": numpy.random.rand(),
    "numpy's own": numpy.random.default_rng().random(),
    "random": random.random(),
    "uuid1": str(uuid.uuid1()),
    "uuid4": str(uuid.uuid4()),
    "tempfile": os.path.basename(tempfile.mktemp()),
    "secrets": secrets.token_hex(8),
    "ssl": ssl.RAND_bytes(8).hex(),
    "authkey": bytes(multiprocessing.current_process().authkey).hex(),
    "sympy": sympy.core.random.rng.random(),
    "sympy's assumptions": sympy.core.random._assumptions_rng.random(),
    "sympy's dummies": Dummy._prng.random(),
}
told = {
    "drawn": drawn, "seen": seen, "argv": sys.argv[1:], "tempdir": tempfile.gettempdir(),
    "spec": torch.__spec__.origin == torch.__file__ and "Preloaded" not in repr(torch.__spec__),
}
with open(os.path.join(sys.argv[1], os.environ["RANK"] + ".json"), "w") as file:
    json.dump(told, file)
"""


def write(folder, source):
    script = folder / "script.py"
    script.write_text(source)
    return script


def test_unseeded_ranks_draw_different_numbers_and_options_after_the_script_are_its_own(tmp_path):
    (tmp_path / "own").mkdir()
    script = write(tmp_path, STATES)
    ended = dure(
        *(
            "run",
            "--nproc_per_node=3",
            "--run-dir",
            tmp_path / "run",
            script,
            tmp_path,
            "--lr",
            1,
            "--ranks",
            9,
        )
    )
    assert ended.code == 0, ended.err
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    for name in told[0]["drawn"]:
        assert len({rank["drawn"][name] for rank in told}) == 3, name
    for rank in told:
        assert rank["seen"] == []
        assert rank["argv"] == [str(tmp_path), "--lr", "1", "--ranks", "9"]
        assert rank["tempdir"] == str(tmp_path / "own")
        assert rank["spec"]
    # torch's CUDA build may tell at exit what a library of its own has not freed.
    assert [line for line in ended.err.splitlines() if not re.match(r"nanobind:|\s+-|See https", line)] == []


VARIABLES = """
import os
os.environ.update(OMP_NUM_THREADS="3", TORCH_DISTRIBUTED_DEBUG="DETAIL", TORCH_LOGS="+dynamo", TORCH_HOME="/x")
import torch
import torch.distributed
print(torch.get_num_threads(), torch.distributed.get_debug_level().name, torch.hub.get_dir(), flush=True)
if os.environ["RANK"] == "1":
    import ctypes
    ctypes.string_at(0)
"""


def test_variables_set_before_the_import_of_torch_are_applied_or_told_and_a_crash_leaves_its_stacks(tmp_path):
    ended = dure("run", "--run-dir", tmp_path / "run", write(tmp_path, VARIABLES))
    assert ended.code == 1
    assert ended.out.splitlines() == ["3 DETAIL /x/hub"] * 2
    (told,) = [line for line in ended.err.splitlines() if "changed by the script" in line]
    assert told.startswith("dure: TORCH_LOGS: changed by the script before `import torch`")
    assert "dure run --cold" in told
    assert "killed by SIGSEGV: a crash in native code; the Python stacks are in its output" in ended.err
    log = (tmp_path / "run" / "logs" / "rank-1.log").read_text()
    assert "Fatal Python error: Segmentation fault" in log
    assert f'File "{tmp_path / "script.py"}", line 9 in <module>' in log


OWN_PACKAGE = """
import sys
from accelerate import NAME
import numpy
print(NAME, "accelerate.state" in sys.modules, numpy.ones(2).sum())
"""


def test_a_package_of_the_scripts_own_is_not_taken_for_the_one_that_was_preloaded(tmp_path):
    (tmp_path / "accelerate.py").write_text("NAME = 'mine'\n")
    ended = dure("run", "--run-dir", tmp_path / "run", write(tmp_path, OWN_PACKAGE))
    assert (ended.code, ended.out) == (0, "mine False 2.0\n" * 2), ended.err


UNSAFE = """
import transformers
print(transformers.STATE)
"""


SPAWNS = """
import multiprocessing, os, sys
class Item:
    def __init__(self, x):
        self.x = x
def make(x):
    return Item(x + 1)
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        (item,) = pool.map(make, [int(os.environ["RANK"])])
    print("made", type(item) is Item, item.x)
"""


def test_objects_of_its_own_classes_come_back_from_processes_that_it_spawns(tmp_path):
    ended = dure("run", "--ranks", 2, "--run-dir", tmp_path / "run", write(tmp_path, SPAWNS))
    assert ended.code == 0, ended.err
    assert sorted(ended.out.split("\n")[:2]) == ["made True 1", "made True 2"]


def test_what_starts_a_thread_or_fails_when_it_is_imported_is_imported_by_the_ranks(tmp_path):
    """A package on the path that is named like one that is preloaded: it starts a thread, which no fork would have."""
    (tmp_path / "transformers.py").write_text(
        "import os, threading\n"
        "wake = threading.Event()\n"
        "thread = threading.Thread(target=wake.wait, daemon=True)\n"
        "thread.start()\n"
        "STATE = (os.getpid() == int(open('/proc/self/stat').read().split()[0]), thread.is_alive())\n"
    )
    (tmp_path / "accelerate.py").write_text(
        "import os\nif 'RANK' not in os.environ:\n    raise SystemExit(7)\n"
    )
    script = write(tmp_path, f"import accelerate\n{UNSAFE}")
    ended = dure(
        *("run", "--ranks", 2, "--run-dir", tmp_path / "run", script),
        PYTHONPATH=os.pathsep.join([str(tmp_path)]),
    )
    assert (ended.code, ended.out) == (0, "(True, True)\n" * 2), ended.err


ORDER = """
import os, sys, time
rank = os.environ["RANK"]
for number in range(200):
    print(f"{rank} out {number}")
    print(f"{rank} err {number}", file=sys.stderr)
if sys.stdout.isatty():
    print("size", rank, *os.get_terminal_size(1), *os.get_terminal_size(2))
else:
    print("no terminal", rank)
"""


def in_order(text, rank):
    mine = [line for line in text.replace("\r\n", "\n").splitlines() if line.startswith(f"{rank} ")]
    return mine == [f"{rank} {name} {number}" for number in range(200) for name in ("out", "err")]


def in_terminal(command, columns=97):
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 33, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "dure", *map(str, command)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    text = b""
    while True:
        try:
            text += os.read(ours, 65536)
        except OSError:  # everybody has gone
            break
    os.close(ours)
    assert process.wait(300) == 0, text
    return text.decode()


def test_in_a_terminal_ranks_have_one_of_its_size_and_what_they_print_stays_in_order(tmp_path):
    shown = in_terminal(["run", "--cold", "--run-dir", tmp_path / "run", write(tmp_path, ORDER)])
    for rank in range(2):
        log = (tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text()
        assert in_order(shown, rank)
        assert in_order(log, rank)
        assert f"size {rank} 97 33 97 33" in shown
        assert "\r" not in log


def test_in_one_file_what_a_rank_prints_stays_in_order(tmp_path):
    with (tmp_path / "all").open("w") as file:
        subprocess.run(
            [
                sys.executable,
                "-m",
                "dure",
                "run",
                "--cold",
                "--run-dir",
                tmp_path / "run",
                write(tmp_path, ORDER),
            ],
            stdout=file,
            stderr=subprocess.STDOUT,
            check=True,
            timeout=300,
        )
    text = (tmp_path / "all").read_text()
    for rank in range(2):
        assert in_order(text, rank)
        assert f"no terminal {rank}" in text


def test_ps_shows_the_script_and_the_rank(tmp_path):
    script = write(
        tmp_path,
        "import os, sys, time\n"
        "open(os.path.join(sys.argv[1], os.environ['RANK']), 'w').close()\n"
        "sys.stdin.read()\n",
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "dure", "run", "--run-dir", tmp_path / "run", script, tmp_path, "--lr", "1"],
        stdin=subprocess.PIPE,
    )
    wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(2)), "ranks", 300)
    shown = {
        child.name(): " ".join(child.cmdline())
        for child in psutil.Process(process.pid).children(recursive=True)
    }
    process.communicate(timeout=300)
    assert process.returncode == 0
    assert shown == {
        "dure prefork": f"dure: prefork server of {process.pid}",
        "dure store": f"dure: store of {process.pid}",
        "rank0 script.py": f"rank 0 of 2: {script} {tmp_path} --lr 1",
        "rank1 script.py": f"rank 1 of 2: {script} {tmp_path} --lr 1",
    }


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["mistyped.py"], "the script 'mistyped.py' does not exist"),
        (["-m", "no_such_module.at_all"], "no module 'no_such_module' is found"),
        (["--ranks", "0", "fine.py"], "--ranks is 0; use 1 or more"),
        (["--ranks", "some", "fine.py"], "--ranks is 'some'"),
        (["--node-rank", "3", "--leader", "a:1", "fine.py"], "--node-rank is 3"),
        (["--port", "99999", "fine.py"], "port 99999"),
        (["--no-such-option", "fine.py"], "No such option"),
    ],
)
def test_a_command_that_is_refused_leaves_no_folder(tmp_path, command, words):
    (tmp_path / "fine.py").write_text("")
    ended = dure("run", *command, cwd=tmp_path)
    assert ended.code == 2
    assert words in ended.err
    assert [entry.name for entry in tmp_path.iterdir()] == ["fine.py"]


def test_in_a_folder_that_cannot_be_written_to_the_logs_are_elsewhere(tmp_path):
    script = write(tmp_path, "print('hello')")
    ended = dure("run", "--cold", script, cwd="/sys", XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert (ended.code, ended.out) == (0, "hello\n" * 2), ended.err
    (place,) = re.findall(r"dure: /sys cannot be written to; the run's logs are in (\S+)\n", ended.err)
    assert Path(place).is_relative_to(tmp_path / "cache" / "dure" / "runs")
    assert (Path(place) / "logs" / "rank-1.log").read_text() == "hello\n"
