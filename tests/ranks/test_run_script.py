"""Stock scripts run under `dure run` as under torchrun: here is torchrun, and here is what the script saw."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import FOLDER

from dure.tools.bench.ports import free_ports

SOURCE = str(Path(__file__).parents[2] / "src")
RANKS = 2
# What no two runs share: ports, run ids, file paths of the launcher's own.
OWN = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
UNSET = {"OMP_NUM_THREADS", "PYTEST_CURRENT_TEST"}


def free_port():
    return str(free_ports(1)[0])


def launch(command, folder, end, *, target, cwd=FOLDER):
    folder.mkdir(parents=True)
    env = {name: value for name, value in os.environ.items() if name not in UNSET}
    env["PYTHONPATH"] = SOURCE
    if command == "torchrun":
        own = [
            "--nproc-per-node",
            str(RANKS),
            "--master-port",
            free_port(),
            "--log-dir",
            str(folder / "logs"),
        ]
        argv = ["torch.distributed.run", *own, *target, str(folder), end]
    else:
        own = ["--ranks", str(RANKS), "--run-dir", str(folder / "run")]
        argv = ["dure", "run", *own, *command.split()[1:], *target, str(folder), end]
    done = subprocess.run(
        [sys.executable, "-m", *argv],
        check=False,
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        input="typed",
    )
    assert all((folder / f"{rank}.json").exists() for rank in range(RANKS)), done.stderr
    seen = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return done, seen


def compare(ours, theirs):
    for mine, reference in zip(ours, theirs, strict=True):
        for name in OWN:
            assert name in mine["env"]
            assert name in reference["env"]
            del mine["env"][name], reference["env"][name]
        # What dure adds: where the run keeps its files, and the memory for a state that outlives the ranks.
        assert {name for name in mine["env"] if name.startswith("DURE_")} == {"DURE_KEEP", "DURE_RUN"}
        del mine["env"]["DURE_KEEP"], mine["env"]["DURE_RUN"]
        # One stdin for all ranks: whoever reads first has it.
        assert {mine.pop("stdin"), reference.pop("stdin")} <= {"typed", ""}
        mine["argv"][1] = reference["argv"][1] = "folder"
        mine["orig_argv"][-2] = reference["orig_argv"][-2] = "folder"
        assert mine == reference
        assert mine["is_main"]
        assert mine["noises_differ"]


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory):
    return launch("torchrun", tmp_path_factory.mktemp("torchrun") / "r", "raise", target=["probe.py"])


def lines(text, start):
    return sorted(line for line in text.splitlines() if line.startswith(start))


@pytest.mark.parametrize("command", ["dure", "dure --cold"])
def test_a_script_sees_what_it_sees_under_torchrun_and_its_exception_ends_the_command_with_1(
    command, torchrun, tmp_path
):
    reference, theirs = torchrun
    done, ours = launch(command, tmp_path / "d", "raise", target=["probe.py"])
    compare(json.loads(json.dumps(ours)), json.loads(json.dumps(theirs)))
    assert done.returncode == reference.returncode == 1
    assert lines(done.stdout, "out") == lines(reference.stdout, "out") == ["out 0", "out 1"]
    assert lines(done.stderr, "err") == ["err 0", "err 1"]
    # The traceback is the script's own, line for line what a plain interpreter prints.
    trace = re.compile(r"^\S* ?Traceback.*?ValueError: as asked\n", re.S | re.M)
    assert trace.search(done.stderr)[0] == trace.search(reference.stderr)[0]
    if command == "dure":
        assert done.stderr.splitlines()[-1].endswith("failed: ValueError: as asked")
    log = (tmp_path / "d" / "run" / "logs" / "rank-1.log").read_text()
    assert "out 1\n" in log
    assert "err 1\n" in log
    assert "ValueError: as asked" in log


def test_a_module_runs_as_main_and_success_is_0_and_what_it_left_open_is_flushed(torchrun, tmp_path):
    done, ours = launch("dure", tmp_path / "d", "leave", target=["-m", "support.probe"], cwd=FOLDER.parent)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stderr.splitlines()) == ["err 0", "err 1"]
    assert [(tmp_path / "d" / f"{rank}.txt").read_text() for rank in range(RANKS)] == ["flushed at exit"] * 2
    assert "typed" in [seen["stdin"] for seen in ours]
    for seen, reference in zip(ours, torchrun[1], strict=True):
        assert seen["argv"] == [str(FOLDER / "probe.py"), str(tmp_path / "d"), "leave"]
        assert (seen["name"], seen["package"], seen["spec"]) == ("__main__", "support", "support.probe")
        assert seen["path"] == [str(FOLDER.parent), *reference["path"][1:]]
        assert seen["cwd"] == str(FOLDER.parent)
        assert seen["is_main"]
        assert set(seen["env"]) - {"DURE_KEEP", "DURE_RUN"} == set(reference["env"])


@pytest.mark.parametrize("end", ["3", "0"])
def test_the_exit_code_of_the_command_is_torchruns(end, tmp_path):
    script = tmp_path / "leave.py"
    script.write_text(f"import sys; sys.exit({end})")
    commands = [
        ["torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", str(script)],
        ["dure", "run", "--ranks=2", "--cold", f"--run-dir={tmp_path / 'cold'}", str(script)],
    ]
    if end == "3":  # that a warm rank ends with 0 is shown above
        commands.append(["dure", "run", "--ranks=2", f"--run-dir={tmp_path / 'warm'}", str(script)])
    env = {**os.environ, "PYTHONPATH": SOURCE, "TMPDIR": str(tmp_path)}
    started = [
        subprocess.Popen([sys.executable, "-m", *argv], env=env, stdout=-1, stderr=-1, text=True)
        for argv in commands
    ]
    ends = [(process.communicate(timeout=300), process.returncode) for process in started]
    assert [code for _, code in ends] == [int(end != "0")] * len(commands)
    if end == "3":
        assert "sys.exit(3)" in ends[2][0][1]
        assert "exit code 3" in ends[1][0][1]
