"""How a node starts is a value that crosses to other hosts and into images unchanged."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import dure

from dure.base.errors import JobError, UsageError
from dure.base.lines import decode
from dure.config import load_job, parse_settings
from dure.engine.node_start import NodeStart, read_start

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def start(tmp_path):
    settings = parse_settings(["train.lr=0.5"])
    loaded = load_job(EXAMPLES / "three_weights.toml", settings, "1:2").on_nodes(1, 2)
    return NodeStart(
        loaded, tmp_path / "job.toml", tmp_path / "a run", port=7, node_rank=1, leader="h:1", lang="ko"
    )


def test_a_start_crosses_as_a_message_and_as_a_file_which_is_removed(start, tmp_path):
    name, plain = decode(start.to_line())
    assert name == "Start"
    assert NodeStart.from_json(plain) == start
    file = tmp_path / "start.json"
    file.write_text(json.dumps(start.to_json()))
    assert read_start(str(file)) == start
    assert not file.exists()
    with pytest.raises(JobError, match="3 nodes with 2 ranks each"):
        start.loaded.on_nodes(1, 3)
    assert (start.loaded.job.cluster.nodes, start.loaded.job.cluster.min_nodes) == (2, 1)


@pytest.mark.parametrize("change", [{"leader": None, "new": 1}, {"loaded": "{}"}, {"loaded": 3}])
def test_what_another_version_wrote_is_refused(start, change):
    with pytest.raises(UsageError, match="the same version"):
        NodeStart.from_json({**start.to_json(), **change})
    with pytest.raises(UsageError, match="the same version"):
        NodeStart.from_json({})


def test_an_agent_trains_the_job_that_it_is_handed_not_the_file_as_it_is_by_now(tmp_path):
    job = tmp_path / "job.toml"
    job.write_text((EXAMPLES / "three_weights.toml").read_text())
    (tmp_path / "three_weights.py").write_text((EXAMPLES / "three_weights.py").read_text())
    start = NodeStart(load_job(job, {}, "1"), job, tmp_path / "run", as_json=True)
    job.write_text("this is no job any more")
    ended = subprocess.run(
        [sys.executable, "-m", "dure", "agent", "-"],
        input=start.to_line(),
        capture_output=True,
        cwd=tmp_path,
        check=True,
    )
    assert json.loads(ended.stdout)["ranks"] == 1


def test_an_agent_that_is_handed_nothing_says_so(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "dure", "agent", "-"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "nothing has come over standard input" in ended.stderr
    assert dure("agent", tmp_path / "none.json").code == 2
    assert "\n  agent " not in dure("--help").out
