"""`dure new`: what it writes trains at once, as a job and as a script, to the same bits."""

import json
import re

import pytest
from support.commands import dure

from dure.base.errors import UsageError
from dure.tools.new import FILES, write_project


def test_a_new_project_trains_as_a_job_and_as_a_script_to_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = dure("new", "my project!", "--json")
    assert made.code == 0, made.err
    assert sorted(json.loads(made.out)["files"]) == sorted(FILES)
    monkeypatch.chdir(tmp_path / "my project!")
    job = dure("train", "job.toml", "--json")
    assert job.code == 0, job.err
    summary = json.loads(job.out)
    assert summary["name"] == "my-project"
    assert summary["metrics"]["accuracy"] > 0.9
    script = dure("run", "--ranks", 1, "train.py")
    assert script.code == 0, script.err
    assert re.findall(r"weights (\w+) on every rank", script.out) == [summary["fingerprints"][0]]


def test_nothing_that_is_there_is_written_over(tmp_path):
    (tmp_path / "parts.py").write_text("mine")
    with pytest.raises(UsageError, match=r"parts\.py exists already; give another folder"):
        write_project(tmp_path, "en")
    assert [path.name for path in tmp_path.iterdir()] == ["parts.py"]
    assert (tmp_path / "parts.py").read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_said_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot write the project into"):
        write_project(tmp_path / "file" / "below", "en")


@pytest.mark.parametrize(
    ("language", "word"), [("en", "Replace them by your own"), ("ko", "여러분의 것으로")]
)
def test_the_readme_is_in_the_readers_language(tmp_path, language, word):
    write_project(tmp_path / "한글 이름", language)
    text = (tmp_path / "한글 이름" / "README.md").read_text(encoding="utf-8")
    assert word in text
    assert text.startswith("# project\n")  # a job's name is in ASCII letters
