"""The wheel in an empty virtual environment, outside of the project: `dure demo` and a copied example work."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from support import FOLDER
from support.commands import EXAMPLES, ROOT
from support.wheels import build_wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder of an installed dure's commands, with what its dependency list alone brings."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True, timeout=300)
    commands = folder / "venv" / "bin"
    pip = [commands / "python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    torch = subprocess.run([*pip, "torch"], capture_output=True, text=True, timeout=1200, check=False)
    if torch.returncode != 0:
        pytest.skip(f"pip cannot install torch here: {torch.stderr.strip().splitlines()[-1]}")
    subprocess.run([*pip, build_wheel(folder)], check=True, timeout=600)
    yield commands
    shutil.rmtree(folder)


def run(commands, folder, *arguments):
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [commands / "dure", *arguments],
        env={**env, "LC_ALL": "C.UTF-8"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_the_demo_works_from_an_installed_wheel_and_learns(installed, tmp_path):
    ran = run(installed, tmp_path, "demo", "--json")
    assert ran.returncode == 0, ran.stderr
    summary = json.loads(ran.stdout.splitlines()[-1])
    assert summary["ranks"] == 4
    assert len(set(summary["fingerprints"])) == 1
    assert len(summary["fingerprints"]) == 4
    assert summary["samples"] == 400
    assert summary["ledger"]["exactly_once"] is True
    assert summary["ledger"]["eval_exactly_once"] is True
    assert summary["metrics"]["accuracy"] >= 0.95
    assert summary["completely_recorded"] is True
    print(f"training {summary['seconds']['train']} s, held out {summary['metrics']['accuracy']:.0%}")
    shared = tmp_path / "shared"
    assert sorted(path.name for path in shared.iterdir()) == [
        "checkpoints",
        "ddp.py",
        "models",
        "training_data",
    ]
    assert len(list((shared / "training_data" / "train").glob("*.png"))) == 400


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_an_example_copied_out_of_the_project_trains_with_an_installed_wheel(installed, tmp_path):
    for name in ("three_weights.toml", "three_weights.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    ran = run(installed, tmp_path, "train", "three_weights.toml", "--ranks", "2", "--json")
    assert ran.returncode == 0, ran.stderr
    assert len(set(json.loads(ran.stdout.splitlines()[-1])["fingerprints"])) == 1


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_every_command_of_an_installed_wheel_has_help(installed, tmp_path):
    shown = run(installed, tmp_path, "--help").stdout
    commands = [line.split()[0] for line in shown.split("Commands:")[1].splitlines() if line.strip()]
    assert "demo" in commands
    assert {
        command: run(installed, tmp_path, command, "--help").returncode for command in commands
    } == dict.fromkeys(commands, 0)


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_lesson_page_and_report_work_from_an_installed_wheel_without_a_network(installed, tmp_path):
    """Real HTTP requests, in a network namespace where there is nothing but the loopback."""
    [wheel] = installed.parents[1].glob("*.whl")
    pip = [installed / "python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    subprocess.run([*pip, f"{wheel}[page]"], check=True, timeout=600)
    for name in ("three_weights.toml", "three_weights.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    ran = run(installed, tmp_path, "train", "three_weights.toml", "--ranks", "2", "--run-dir", "runs/cut-off")
    assert ran.returncode == 0, ran.stderr
    alone = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no network namespace can be made here: root, unshare and ip are needed")
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    reader = [installed / "python", "-I", FOLDER / "readers.py", installed / "dure", "runs/cut-off"]
    read = subprocess.run(
        [*alone, *map(str, reader)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert read.returncode == 0, read.stderr
    told = json.loads(read.stdout.splitlines()[-1])
    assert (told["state"], told["trouble"]) == ("done", "")
    assert len(told["fingerprints"]) == 2
    assert len(set(told["fingerprints"])) == 1
    assert told["condition"] == "finished"
    assert told["window"] >= 4 * told["steps"][1] > 0
    assert min([*told["lesson"].values(), *told["page"].values()]) > 500
    for command in (["lesson", "-o", "lesson.html"], ["report", "runs/cut-off", "-o", "report.html"]):
        # Neither needs torch: it is not there for them.
        hidden = [*alone, installed / "python", "-c", _WITHOUT_TORCH, *command]
        made = subprocess.run(
            hidden, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
        )
        assert made.returncode == 0, made.stderr
        assert (tmp_path / command[-1]).stat().st_size > 50_000


_WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from dure.cli import main; main()"
