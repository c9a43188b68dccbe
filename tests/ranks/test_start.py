"""What a start costs: torch is imported once for all ranks, its compiler only for those who compile."""

import json

import pytest
from support.commands import dure

JOB = """
name = "looks"
[model]
factory = "looks.py:model"
[data]
factory = "looks.py:data"
global_batch = 8
[train]
steps = 1
lr = 0.1
"""
PARTS = """
import json, os, sys
from pathlib import Path
import torch

def model():
    return torch.nn.Linear(4, 2)

def loss(outputs, targets):
    prefork = Path(f"/proc/{os.getppid()}/status").read_text()
    launcher = prefork.partition("PPid:")[2].split()[0]
    seen = {
        "launcher has torch": "libtorch" in Path(f"/proc/{launcher}/maps").read_text(),
        "rank has the compiler": "torch._dynamo.eval_frame" in sys.modules or "sympy" in sys.modules,
        "only the prefork server has imported torch": "libtorch" in Path(f"/proc/{os.getppid()}/maps").read_text(),
    }
    Path(__file__).with_name(f"seen-{os.environ['RANK']}.json").write_text(json.dumps(seen))
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="sum"), len(targets)

def data():
    return torch.utils.data.TensorDataset(torch.ones(8, 4), torch.zeros(8, dtype=torch.int64))
"""


def test_the_launcher_goes_without_torch_and_plain_jobs_without_its_compiler(tmp_path):
    (tmp_path / "job.toml").write_text(JOB + 'loss = "looks.py:loss"\n[team]\nranks = 2\n')
    (tmp_path / "looks.py").write_text(PARTS)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    ended = dure("train", tmp_path / "job.toml", "--run-dir", tmp_path / "run", "--json", TMPDIR=temporary)
    assert ended.summary["steps"] == 1
    for rank in range(2):
        assert json.loads((tmp_path / f"seen-{rank}.json").read_text()) == {
            "launcher has torch": False,
            "rank has the compiler": False,
            "only the prefork server has imported torch": True,
        }
    assert not list(temporary.iterdir())


@pytest.mark.soak
def test_the_bench_measures_starts_beside_torchrun_and_a_step_beside_an_import():
    figures = dure("bench", "start", "--ranks", 2, "--rounds", 1, "--json").summary
    assert figures["ratio"] == pytest.approx(figures["torchrun_seconds"] / figures["dure_seconds"], abs=0.02)
    assert figures["train_one_step_seconds"] > 0
    assert figures["import_torch_seconds"] > 0
    assert figures["train_over_import"] == pytest.approx(
        figures["train_one_step_seconds"] / figures["import_torch_seconds"], abs=0.02
    )
