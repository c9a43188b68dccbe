"""The reference has an example of every public name, and its examples run."""

import re
from pathlib import Path

import pytest
import torch

import dure
from dure.team.team import PUBLIC

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def blocks():
    return re.findall(
        r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )


def test_every_public_name_has_an_example():
    text = "\n".join(blocks())
    names = [f"dure.{name}" for name in dure.__all__ if name != "__version__"] + [
        f"team.{name}" for name in PUBLIC
    ]
    assert [name for name in names if not re.search(rf"\b{re.escape(name)}\b", text)] == []


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_examples_run_one_after_the_other(tmp_path, monkeypatch, capsys, one_thread):
    monkeypatch.chdir(tmp_path)
    names = {}
    for at, block in enumerate(blocks()):
        exec(compile(block, f"{PAGE.name}, block {at}", "exec"), names)
    assert names["cores"] == [{"rank": 0, "threads": 1}]
    assert names["names"] == ["read", "once"]
    assert re.fullmatch(r"[0-9a-f]{16}", names["fingerprint"])
    assert (tmp_path / "loggers" / "metrics.csv").read_text().startswith("step,name,value\n")
    assert "rank 0 of 1, on cpu" in capsys.readouterr().out
