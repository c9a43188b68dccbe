"""A run's record is read right, quickly and without trust, whatever is in its folder."""

import json
import os
import shutil
import time
from contextlib import closing, suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dure.observe.events import Ended, Noted, Proved, Recorder, Stepped, TeamFormed, encode
from dure.page.cache import Cache
from dure.page.columns import AT, COLUMNS, read_line
from dure.page.pyramid import CHUNK, STATS, Pyramid
from dure.page.rank_feed import RankFeed
from dure.page.run import RunView
from dure.page.straggler import straggler
from dure.tools.bench.page import synthetic_run

TEAM = TeamFormed(0, 2, 8, 1, "cpu", "here", 1, True, "r" * 64, 10, 40, 100)
STEP = Stepped(
    0, 0, 1.5, 4, 8, {"save": 0.0, "data": 0.001, "compute": 0.02, "exchange": 0.01, "wait": 0.004, "update": 0.002},
    0.1, None, (1, 2, 3, 4), None,
)  # fmt: skip


TOLD = {"min": np.min, "max": np.max, "first": lambda part: part[0], "last": lambda part: part[-1]}


def written(folder, rank=0, steps=range(10), team=TEAM, part_bytes=4 << 20):
    """A rank's events, as its recorder writes them."""
    (folder / "events").mkdir(parents=True, exist_ok=True)
    recorder = Recorder(folder / "events" / f"rank-{rank}.jsonl", part_bytes=part_bytes)
    recorder.record(replace(team, rank=rank))
    for step in steps:
        recorder.record(replace(STEP, step=step, loss=1 / (1 + step)))
    recorder.close()


def losses(view, first, end, bins=10_000):
    _, found = view.window(first, end, bins, ["loss"], [0], ["mean"], most=bins)
    return found[0, 0, 0]


def test_what_a_rank_records_is_what_the_page_shows(tmp_path):
    written(tmp_path, 0)
    written(tmp_path, 1)
    view = RunView(tmp_path)
    state = view.state()
    assert state["steps"] == [0, 10]
    assert [one["rank"] for one in state["nodes"][0]["ranks"]] == [0, 1]
    assert state["nodes"][0]["ranks"][1]["shards"] == [4, 5, 6, 7]
    assert losses(view, 0, 10) == pytest.approx([1 / (1 + step) for step in range(10)])
    _, found = view.window(0, 10, 10, ["wait", "compute"], None, ["mean"])
    assert found[1, 0, 0] == pytest.approx(4000)
    assert found[0, 0, 1] == pytest.approx(20_000)
    assert view.samples()["recorded"]["owner"][1:5] == [1, 1, 1, 1]  # both recorded the same four
    view.close()


def test_a_step_takes_few_bytes_when_it_is_compacted(tmp_path):
    """The wait and the saving are told too, and it stays at some tens of bytes per step and rank."""
    steps = 4000
    recorder = Recorder(tmp_path / "rank-0.jsonl", part_bytes=100_000)
    draw = np.random.default_rng(1)
    for step in range(steps):
        seconds = {name: round(float(draw.integers(1000, 90_000)) / 1e6, 6) for name in STEP.seconds}
        seconds["save"] = 0.0
        recorder.record(replace(STEP, step=step, loss=float(draw.random()), seconds=seconds))
        if step % 500 == 0:
            time.sleep(0.15)
    recorder.close()
    sizes = [path.stat().st_size for path in tmp_path.glob("*.gz")]
    assert sizes
    assert sum(sizes) / steps < 64


def test_only_what_is_new_is_told_again(tmp_path):
    written(tmp_path)
    view = RunView(tmp_path)
    first = view.state()
    assert [item["kind"] for item in first["items"]] == ["team"]
    assert view.state(first["until"])["items"] == []
    with (tmp_path / "events" / "rank-0.jsonl").open("a") as file:
        file.write(encode(Proved(9, "ab" * 8, agree=True), 5.0, 11))
    time.sleep(0.45)
    later = view.state(first["until"])
    assert [item["kind"] for item in later["items"]] == ["proof"]
    view.close()
    with closing(RunView(tmp_path)) as another:
        assert another.state(later["until"])["fresh"], "another server's answer is told from the start"


def test_a_resumed_run_shows_the_last_told_of_each_step(tmp_path):
    written(tmp_path, steps=range(10))
    recorder = Recorder(tmp_path / "events" / "rank-0.jsonl")
    recorder.record(replace(TEAM, session=1, start=6))
    for step in range(6, 14):
        recorder.record(replace(STEP, step=step, loss=100.0 + step))
    recorder.close()
    view = RunView(tmp_path)
    view.read_all()
    assert view.state()["steps"] == [0, 14]
    found = losses(view, 0, 14)
    assert found[:6] == pytest.approx([1 / (1 + step) for step in range(6)])
    assert found[6:] == pytest.approx([100.0 + step for step in range(6, 14)])
    view.close()


def test_a_follower_reads_on_when_the_file_is_compacted(tmp_path):
    (tmp_path / "events").mkdir()
    path = tmp_path / "events" / "rank-0.jsonl"
    recorder = Recorder(path, part_bytes=20_000)
    feed = RankFeed(path, 0, Cache(tmp_path / "page"))
    recorder.record(TEAM)
    for step in range(3000):
        recorder.record(replace(STEP, step=step, loss=float(step)))
        if step % 300 == 0:
            time.sleep(0.12)
            while feed.look():
                pass
    recorder.close()
    while feed.look():
        pass
    feed.close()
    assert list((tmp_path / "events").glob("*.gz")), "nothing was compacted: the test shows nothing"
    assert len(feed.pyramid) == 3000
    found = feed.pyramid.window(0, 3000, 3000, ["loss"], ["last"])
    assert found[0, 0] == pytest.approx(np.arange(3000))
    assert feed.skipped == 0


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long") / "run"
    synthetic_run(folder, 2 * CHUNK + 5000, 1)
    return folder


def test_a_window_of_any_width_is_what_all_raw_steps_say(long_run):
    view = RunView(long_run)
    view.read_all()
    (feed,) = view.feeds().values()
    parts = [table.copy() for _, table in feed.pyramid.raw(0, 2 * CHUNK + 5000)]
    raw = np.concatenate(parts, axis=1)
    assert raw.shape == (len(COLUMNS), 2 * CHUNK + 5000)
    for first, end, bins in ((0, 2 * CHUNK + 5000, 300), (0, 2 * CHUNK + 5000, 1400), (CHUNK - 77, CHUNK + 60_001, 100),
                             (1000, 1200, 500), (CHUNK + 3, CHUNK + 19_000, 64)):  # fmt: skip
        head, found = view.window(first, end, bins, ["loss", "wait"], None, STATS)
        width = head["width"]
        assert head["from"] <= first
        assert head["bins"] <= bins
        for at, name in enumerate(("loss", "wait")):
            column = raw[AT[name], head["from"] : end]
            cut = [column[begin : begin + width] for begin in range(0, len(column), width)]
            for stat, told in TOLD.items():
                expected = np.array([told(part) for part in cut])
                assert (found[0, STATS.index(stat), at] == expected).all(), (name, stat, width)
            mean = np.array([part.mean(dtype=np.float64) for part in cut])
            assert found[0, 4, at] == pytest.approx(mean, rel=1e-5)
    view.close()


def test_a_long_record_is_read_once_and_its_chunks_never_change(long_run):
    files = {path.name: path.stat().st_mtime_ns for path in (long_run / "page").glob("*.steps")}
    assert sorted(files) == ["rank-0.00000.steps", "rank-0.00001.steps"]
    view = RunView(long_run)
    view.look()
    (feed,) = view.feeds().values()
    assert feed.pyramid.chunks == 2
    view.read_all()
    assert view.state()["steps"] == [0, 2 * CHUNK + 5000]
    assert len(feed.pyramid) == 2 * CHUNK + 5000
    view.close()
    assert files == {path.name: path.stat().st_mtime_ns for path in (long_run / "page").glob("*.steps")}


def test_a_damaged_or_foreign_cache_is_not_believed(long_run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(long_run, copy)
    (copy / "page" / "rank-0.00001.steps").write_bytes(b'{"format":"other"}\n')
    view = RunView(copy)
    view.read_all()
    assert view.state()["steps"] == [0, 2 * CHUNK + 5000]
    assert losses(view, CHUNK, CHUNK + 10)[0] > 0
    view.close()
    (copy / "page" / "rank-0.index.json").write_text('{"format": "dure-page-index-1", "first_line": [[[')
    view = RunView(copy)
    view.read_all()
    assert view.state()["steps"] == [0, 2 * CHUNK + 5000]
    view.close()


def test_a_run_that_cannot_be_written_to_is_shown_from_a_temporary_folder(long_run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(long_run, copy, ignore=shutil.ignore_patterns("page"))
    (copy / "page").write_text("a file where the folder would be")
    view = RunView(copy)
    view.read_all()
    place = view._cache.path
    assert place != copy / "page"
    assert losses(view, 0, 10)[0] > 0
    view.close()
    assert not place.exists()


HOSTILE = [b"{}\n", b"\n", b"[]\n", b'{"v":2}\n', b"\xff\xfe\n", b'{"v":2,"kind":"steps"}\n', b"[" * 5000 + b"\n",
           b'{"v":2,"kind":"steps","i":1,"at":0,"n":2,"step":0,"epoch":0,"samples":1,"of":1,"lr":1,"norm":1,'
           b'"loss":[[1],[2]],"after":[0,1],"seconds":{}}\n',
           b'{"v":2,"kind":"steps","i":1,"at":0,"n":1,"step":-5,"epoch":0,"samples":1,"of":1,"lr":1,"norm":1,'
           b'"loss":1,"after":[0],"seconds":{}}\n',
           b'{"v":3,"kind":"note","at":1,"text":"newer"}\n']  # fmt: skip


def test_lines_that_tell_nothing_are_counted_and_left_out(tmp_path):
    written(tmp_path)
    with (tmp_path / "events" / "rank-0.jsonl").open("ab") as file:
        file.writelines(HOSTILE)
        file.write(b'{"v":2,"kind":"note","i":99,"at":1,"te')  # torn
    view = RunView(tmp_path)
    view.read_all()
    assert view.state()["skipped"] == len(HOSTILE)
    assert view.state()["steps"] == [0, 10]
    view.close()


def test_a_line_of_a_gigabyte_is_passed_over(tmp_path):
    written(tmp_path)
    path = tmp_path / "events" / "rank-0.jsonl"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + (1 << 30))  # a hole: zeros, without end
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + encode(Noted("after it"), 9.0, 50).encode())
    view = RunView(tmp_path)
    view.read_all()
    assert [item["text"] for item in view.state()["items"] if item["kind"] == "note"] == ["after it"]
    assert view.state()["skipped"] == 1
    view.close()


@given(st.binary(max_size=300))
def test_no_bytes_can_make_a_line_that_breaks_the_reader(content):
    with suppress(ValueError):
        read_line(content + b"\n")


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                    lambda inner: st.lists(inner, max_size=3), max_leaves=6),
       st.sampled_from(["i", "at", "n", "step", "epoch", "samples", "of", "lr", "norm", "loss", "after",
                        "seconds"]))  # fmt: skip
def test_a_steps_line_with_anything_in_one_place_is_read_or_refused(value, place):
    line = {"v": 2, "kind": "steps", "i": 0, "at": 1.0, "n": 2, "step": 0, "epoch": 0, "samples": 1, "of": 2, "lr": 0.1,
            "norm": None, "loss": [1, 2], "after": [0, 5], "seconds": {"data": [1, 2]}, place: value}  # fmt: skip
    try:
        found = read_line(json.dumps(line, separators=(",", ":")).encode() + b"\n")
    except ValueError:
        return
    assert found.table.shape == (len(COLUMNS), len(found))


def test_a_deleted_run_and_links_are_told_not_followed_into_trouble(tmp_path):
    written(tmp_path / "run")
    os.symlink("/dev/zero", tmp_path / "run" / "events" / "rank-1.jsonl")
    os.symlink("/etc/passwd", tmp_path / "run" / "events" / "rank-2.jsonl")
    os.mkfifo(tmp_path / "run" / "events" / "rank-3.jsonl")
    (tmp_path / "run" / "job.json").symlink_to("/dev/zero")
    view = RunView(tmp_path / "run")
    view.read_all()
    state = view.state()
    assert state["job"] == {}
    assert "root:" not in json.dumps(state)
    shutil.rmtree(tmp_path / "run")
    time.sleep(0.45)
    assert view.state(state["until"])["condition"] == "gone"
    assert losses(view, 0, 10)[0] == pytest.approx(1.0)
    view.close()


def test_the_straggler_is_the_rank_that_waits_least():
    span = np.full((3, 50), 300_000.0)
    wait = np.full((3, 50), 200_000.0) + np.random.default_rng(0).random((3, 50))
    wait[1] = 50
    assert straggler(wait, span)["rank"] == 1
    assert straggler(wait, span)["behind_ms"] == pytest.approx(200, abs=1)
    turns = np.full((3, 60), 90_000.0)
    for step in range(60):
        turns[step % 3, step] = 0
    assert straggler(turns, np.full((3, 60), 300_000.0)) is None, "nobody is always the last"
    assert straggler(np.full((2, 5), np.nan), np.full((2, 5), np.nan)) is None


def test_a_pyramid_that_is_told_steps_in_no_order_gives_up_on_them(tmp_path):
    pyramid = Pyramid(Cache(tmp_path), 0)
    one = np.zeros((len(COLUMNS), 1), np.float32)
    for step in range(0, 2 << 14, 2):
        list(pyramid.append(step, one))
    with pytest.raises(ValueError, match="no order"):
        list(pyramid.append(7, one))
    assert len(pyramid) == 1 << 14


def test_a_run_that_ended_is_finished_and_one_that_did_not_is_stopped(tmp_path):
    written(tmp_path / "run", 0, team=replace(TEAM, ranks=1))
    with closing(RunView(tmp_path / "run")) as view:
        assert view.state()["condition"] in ("stopped", "running")
    with (tmp_path / "run" / "events" / "rank-0.jsonl").open("a") as file:
        file.write(encode(Ended(10, "f" * 16, "a" * 64), 9.0, 11))
    with closing(RunView(tmp_path / "run")) as view:
        assert view.state()["condition"] == "finished"
