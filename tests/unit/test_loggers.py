"""The log writer: never in training's way, and never a step twice."""

import csv
import json
import threading
import time

import pytest

from dure.base.errors import UsageError
from dure.observe.loggers import NAMES, LogWriter, Run, backend, open_writer, writer
from dure.observe.loggers.identity import Watermark, run_id


def steps_in(folder):
    with open(folder / "metrics.csv", newline="", encoding="utf-8") as file:
        return [(row["name"], int(row["step"])) for row in csv.DictReader(file)]


def test_a_session_that_repeats_steps_logs_only_new_ones(tmp_path):
    for first in (0, 3):
        log = open_writer(["csv", "jsonl"], Run(tmp_path, "run", "project"))
        for step in range(first, first + 5):
            log.log(step, {"loss": 1.0 / (step + 1)})
        log.log(first, {"other": float("nan")})  # a metric with steps of its own
        log.close()
    assert [step for name, step in steps_in(tmp_path) if name == "loss"] == list(range(8))
    assert [step for name, step in steps_in(tmp_path) if name == "other"] == [0, 3]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(8))
    assert [row["other"] for row in rows if "other" in row] == [None, None]


def test_what_a_killed_session_had_not_written_is_caught_up_on(tmp_path):
    """Only what a logger lacks at its end, from what the run itself has recorded."""
    log = open_writer(["csv"], Run(tmp_path, "run", "project"))
    log.log(0, {"loss": 4.0})
    log.close()
    earlier = [backend.Row(step, {"loss": 4.0 - step}, 0.0) for step in range(3)]
    log = open_writer(["csv"], Run(tmp_path, "run", "project"), history=lambda: earlier)
    log.log(3, {"loss": 1.0})
    log.close()
    assert [step for _, step in steps_in(tmp_path)] == [0, 1, 2, 3]


def test_half_a_line_that_a_kill_left_is_taken_off(tmp_path):
    (tmp_path / "metrics.csv").write_bytes(b"step,name,value\r\n0,loss,1.0\r\n1,lo")
    log = open_writer(["csv"], Run(tmp_path, "run", "project"))
    log.log(1, {"loss": 0.5})
    log.close()
    assert (tmp_path / "metrics.csv").read_bytes() == b"step,name,value\r\n0,loss,1.0\r\n1,loss,0.5\r\n"


def test_logging_never_waits_for_a_logger_that_hangs(tmp_path, monkeypatch):
    """What does not fit is dropped and counted; closing gives up after its deadline."""
    release, told = threading.Event(), []

    class Hanging:
        def logged(self):
            return {}

        def write(self, rows):
            release.wait(60)

        def close(self):
            pass

    monkeypatch.setattr(writer, "open_backend", lambda name, run: Hanging())
    monkeypatch.setattr(writer, "CAPACITY", 10)
    log = LogWriter(["csv"], Run(tmp_path, "run", "project"), told.append)
    log.log(0, {"loss": 0.0})
    deadline = time.monotonic() + 30
    while log._queue and time.monotonic() < deadline:
        time.sleep(0.01)
    began = time.process_time()
    for step in range(1, 100):
        log.log(step, {"loss": 0.0})
    assert time.process_time() - began < 1.0
    assert log.lost == 89
    log.close(deadline_seconds=0.2)
    release.set()
    assert "not done after 0 s" in told[0]
    assert "89 rows were not logged" in told[1]


def test_a_logger_that_fails_is_told_of_once_and_left_alone_in_the_end(tmp_path, monkeypatch):
    told, tried = [], []

    def broken(name, run):
        tried.append(name)
        raise OSError("no space left\nand more")

    monkeypatch.setattr(writer, "open_backend", broken)
    monkeypatch.setattr(writer, "LOOK_SECONDS", 0.01)
    log = LogWriter(["csv"], Run(tmp_path, "run", "project"), told.append)
    deadline = time.monotonic() + 30
    for step in range(1000):
        log.log(step, {"loss": 0.0})
        if len(told) == 2 or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    log.close()
    assert len(tried) == 3
    assert told == [
        "the logger csv failed: OSError: no space left; training goes on",
        "the logger csv failed: OSError: no space left; it is left alone from now on",
    ]


def test_the_id_stays_and_a_damaged_one_is_replaced(tmp_path):
    made = run_id(tmp_path)
    assert run_id(tmp_path) == made
    (tmp_path / "id.json").write_text('{"id": "../../etc"}')
    assert run_id(tmp_path) not in (made, "../../etc")


def test_the_watermark_survives_and_never_falls(tmp_path):
    mark = Watermark(tmp_path / "logged.json")
    mark.raise_to([backend.Row(3, {"loss": 1.0}, 0.0), backend.Row(2, {"loss": 1.0, "lr": 1.0}, 0.0)])
    assert Watermark(tmp_path / "logged.json").last == {"loss": 3, "lr": 2}
    (tmp_path / "logged.json").write_text("[")
    assert Watermark(tmp_path / "logged.json").last == {}


def test_unknown_and_missing_loggers_are_refused_by_name(monkeypatch, tmp_path):
    with pytest.raises(UsageError, match="there is no logger 'excel'; there are csv, jsonl"):
        open_writer(["excel"], Run(tmp_path, "run", "project"))
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: None)
    for name in NAMES[2:]:
        with pytest.raises(UsageError, match=rf"pip install 'dure\[{name}\]'"):
            open_writer([name], Run(tmp_path, "run", "project"))
    assert list(tmp_path.iterdir()) == []


def test_only_numbers_can_be_logged():
    import torch

    assert writer.numbers_in({"a": 1, "b": torch.tensor(2.5), "c[0]": 3.0}) == {
        "a": 1.0,
        "b": 2.5,
        "c_0_": 3.0,
    }
    for value in ("text", True, None, [1]):
        with pytest.raises(ValueError, match="a is a"):
            writer.numbers_in({"a": value})
