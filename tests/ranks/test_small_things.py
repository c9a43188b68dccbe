"""The small things of a team: printed once, gathered as plain values, done by rank 0 for all, logged once."""

import csv

import pytest

from dure.base.run_folder import RunFolder
from dure.launch import run_team


@pytest.fixture(scope="module")
def loggers(tmp_path_factory):
    return tmp_path_factory.mktemp("loggers")


@pytest.fixture(scope="module")
def found(loggers, tmp_path_factory):
    folder = RunFolder(tmp_path_factory.mktemp("small-2"))
    return run_team("support.small_things:try_all", (str(loggers),), ranks=2, folder=folder, hang_seconds=300)


def test_rank_0_alone_prints_and_all_know_their_device(found):
    assert [rank["printed"] for rank in found] == ["only-once\n", ""]
    assert [rank["device"] for rank in found] == ["cpu", "cpu"]


def test_plain_values_are_gathered_and_all_else_is_refused_on_all_ranks(found):
    values = [{"rank": rank, "list": [1.5, None, "한글"]} for rank in range(2)]
    for rank in found:
        assert rank["gathered"] == values
        assert rank["tensor"].startswith("UsageError: team.gather: Object of type Tensor is not JSON")
        assert "a tuple would not come back as it went" in rank["tuple"]
        assert rank["one rank's tuple"].startswith("UsageError: rank 1: team.gather: a tuple")


def test_what_rank_0_does_is_everybodys(found):
    assert [rank["called"] for rank in found] == [[7], []]
    assert [rank["on leader"] for rank in found] == [[7, "a", 0]] * 2
    assert all("TypeError" in rank["raised"] for rank in found)


def test_a_script_logs_once_whatever_the_number_of_ranks(found, loggers):
    for rank in found:
        assert "team.log has nowhere to log to" in rank["no log"]
        assert "there is no logger 'excel'" in rank["unknown logger"]
        assert "team.log_to was called already" in rank["twice"]
    with open(loggers / "metrics.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["name"]) for row in rows] == [
        (str(s), n) for s in range(3) for n in ("loss", "rank")
    ]
    assert {row["value"] for row in rows if row["name"] == "rank"} == {"0.0"}
