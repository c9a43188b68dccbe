"""Loggers: one run in each of them, no step twice and none left out, also when a rank is killed in the middle."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import FOLDER
from support.commands import train
from support.leftovers import wait_until

from dure.base.run_folder import RunFolder
from dure.observe.events import Evaluated, Stepped, read_events

TOOLS = [
    name
    for name in ("csv", "jsonl", "tensorboard", "mlflow", "wandb", "trackio")
    if name in ("csv", "jsonl") or importlib.util.find_spec(name) is not None
]
JOB = """
name = "logged"
[model]
factory = "{here}/killed_once.py:plain"
[data]
factory = "{here}/killed_once.py:points"
args = {{ folder = "{folder}", rank = {rank} }}
global_batch = 16
[eval]
factory = "{here}/killed_once.py:still"
args = {{ samples = 20 }}
metrics = ["accuracy"]
every_steps = 4
[train]
steps = 12
clip_norm = 1.0
[checkpoint]
memory_every = 3
[log]
to = {tools}
"""


def logged(folder, tools=TOOLS):
    """Read in a process of its own: these tools remember where they looked first."""
    folder = Path(folder) / "loggers"
    ran = subprocess.run(
        [sys.executable, str(FOLDER / "read_logs.py"), str(folder), *tools],
        env={**os.environ, "TRACKIO_DIR": str(folder / "trackio"), "MLFLOW_ALLOW_FILE_STORE": "true"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def job(folder, rank, tools=TOOLS):
    path = folder / "job.toml"
    path.write_text(
        JOB.format(here=FOLDER, folder=folder, rank=rank, tools=json.dumps(tools)), encoding="utf-8"
    )
    return path


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Rank 0, which writes, is killed in the middle; the run is resumed for some steps more afterwards."""
    folder = tmp_path_factory.mktemp("logged")
    path, run = job(folder, 0), folder / "run"
    assert train(path, run, "--ranks", 2).summary["steps"] == 12
    assert (folder / "killed").exists()
    assert RunFolder(run).restarts.exists()
    assert train(path, run, "--ranks", 3, "--set", "train.steps=15").summary["steps"] == 15
    return run


@pytest.fixture(scope="module")
def found(killed):
    return logged(killed)


def recorded(run):
    """What the run's own events say: the last word on each step."""
    events = list(read_events(RunFolder(run).events(0)))
    losses = {event.step: event.loss for event in events if isinstance(event, Stepped)}
    judged = {event.step: event.metrics["accuracy"] for event in events if isinstance(event, Evaluated)}
    return losses, judged


@pytest.mark.parametrize("tool", TOOLS)
def test_after_a_restart_and_a_resume_there_is_one_run_and_no_step_twice(killed, found, tool):
    losses, judged = recorded(killed)
    assert sorted(losses) == list(range(15))
    for name, wanted in (("loss", losses), ("eval/accuracy", judged)):
        points = found[tool][name]
        assert len({run for run, _, _ in points}) == 1
        steps = [step for _, step, _ in points]
        assert len(set(steps)) == len(steps)
        if tool in ("wandb", "trackio"):  # what was on its way when the rank was killed may be lost
            assert set(steps) <= set(wanted)
            assert set(range(12, 15)) <= set(steps) or name != "loss"
        else:
            assert sorted(steps) == sorted(wanted)
        for _, step, value in points:
            assert value == pytest.approx(wanted[step], rel=1e-6)


def test_all_loggers_have_the_learning_rate_and_the_norm_too(found):
    for tool, names in found.items():
        assert {"loss", "lr", "grad_norm", "eval/loss", "eval/accuracy"} <= set(names), tool


def test_nothing_of_a_logger_is_left_running(killed):
    def running():
        mine = [
            path.parent.name
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if str(killed).encode() in _bytes(path) or b"wandb-core" in _bytes(path)
        ]
        return [pid for pid in mine if b"logged" in _bytes(Path(f"/proc/{pid}/environ"))]

    wait_until(lambda: not running(), 60)


def _bytes(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_logger_that_is_missing_is_one_line_before_the_first_step(tmp_path):
    """A folder in the package's place that hides it."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        "import importlib.util as u, sys\n"
        "found = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name == 'mlflow' else found(name, package)\n"
    )
    (tmp_path / "killed").touch()
    ended = train(
        job(tmp_path, 9, ["csv", "mlflow"]),
        tmp_path / "run",
        "--ranks",
        2,
        PYTHONPATH=os.pathsep.join([str(hidden), *filter(None, [os.environ.get("PYTHONPATH")])]),
    )
    assert ended.code == 2
    words = (
        "the logger mlflow needs a package that is not installed; pip install 'dure[mlflow]', or leave it out"
    )
    assert words in ended.err
    assert not any(isinstance(event, Stepped) for event in read_events(RunFolder(tmp_path / "run").events(0)))
