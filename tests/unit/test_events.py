"""What happened is recorded off the training thread; a disk that refuses never stops training, and a line that cannot
be read costs no more than itself."""

import dataclasses
import gzip
import json
import math
import os
import random
import time

from support.disks import disk_that_hangs, fill, needs_root, small_disk

from dure.base.run_folder import RunFolder
from dure.observe import events
from dure.observe.display import Display
from dure.observe.events import parts


def stepped(step, epoch=0, ids=8, **changes):
    return events.Stepped(
        **{
            "epoch": epoch,
            "step": step,
            "loss": 0.5 / (step + 1),
            "samples": 8,
            "samples_of_batch": 32,
            "seconds": {"data": 0.001, "compute": (100_000 + step) / 1e6, "exchange": 0.01, "update": 0.01},
            "lr": 1e-3,
            "grad_norm": None,
            "ids": tuple(range(step, step + ids)) if ids else None,
            "mark": None if ids else "00000000000000ff",
            **changes,
        }
    )


def team(session=0, start=0):
    return events.TeamFormed(0, 2, 8, 1, "cpu", "host", 1, True, "abc", 10, 400, 20, session, start)


def write(path, recorded, **options):
    recorder = events.Recorder(path, **options)
    for event in recorded:
        recorder.record(event)
    recorder.close(60)
    return recorder


def without_samples(recorded):
    return [
        dataclasses.replace(event, ids=None, mark=None) if isinstance(event, events.Stepped) else event
        for event in recorded
    ]


EVERYTHING = [
    team(),
    *map(stepped, range(5)),
    stepped(5, epoch=1, loss=math.inf),
    stepped(6, epoch=1, grad_norm=0.25, lr=0.5),
    stepped(9, epoch=1, ids=0),
    events.Proved(4, "f00", True),
    events.Evaluated(4, {"accuracy": 1.0, "worst": math.inf}, 50, 100, "00"),
    events.WeightsLoaded("slices", "f00", 12, {"read": 0.5}, "meta"),
    events.Loading(10, 20, 0.5),
    events.StorageUsed(0, "s3://bucket/job", "weights", 12, 1 << 33, 0.25),
    events.CheckpointSaved(5, None, "full", 0, 0.5),
    events.Noted("nan, 한글 \\ud800\n"),
    events.Ended(5, "f00", "sha"),
]


def test_events_come_back_as_they_were(tmp_path):
    path = tmp_path / "events.jsonl"
    recorder = write(path, EVERYTHING)
    assert list(events.read_events(path)) == EVERYTHING
    assert recorder.lost == 0
    records = list(events.Reading(path).records())
    assert [record.number for record in records] == list(range(len(EVERYTHING)))
    assert all(abs(record.at - time.monotonic()) < 3600 for record in records)


def test_steps_that_follow_each_other_share_a_line_and_keep_their_times(tmp_path):
    recorded = [events.Recorded(at, 5.25 + at / 7, stepped(at)) for at in range(300)]
    text = events.encode_all(recorded)
    assert text.count("\n") == 1
    (path := tmp_path / "events.jsonl").write_text(text)
    found = list(events.Reading(path).records())
    assert [(one.number, one.event) for one in found] == [(one.number, one.event) for one in recorded]
    assert all(abs(one.at - other.at) < 1e-5 for one, other in zip(found, recorded, strict=True))


def test_a_line_that_is_cut_short_damaged_or_made_up_costs_no_more_than_itself(tmp_path):
    good = [events.encode(stepped(at), 0.0) for at in range(4)]
    bad = [
        "{}\n",
        "[]\n",
        "nonsense\n",
        "\n",
        "[" * 100_000 + "\n",
        '{"v":"2","kind":"note","at":0,"text":""}\n',
        '{"v":2,"kind":"note","at":0,"text":7}\n',
        '{"v":2,"kind":"note","at":0,"text":"","more":1}\n',
        '{"v":2,"kind":"nothing","at":0}\n',
        '{"v":2,"kind":["note"],"at":0,"text":""}\n',
        '{"v":2,"kind":"note","at":"x","text":""}\n',
        good[0].replace('"n":1', '"n":1000000000'),
        good[0].replace('"n":1', '"n":2'),
        good[0].replace('"step":0', '"step":-1'),
        good[0].replace('"loss":0.5', '"loss":1' + "0" * 400),
        good[0].replace('"loss":0.5', '"loss":"much"'),
        events.encode(team(), 0.0).replace('"steps":20', '"steps":1' + "0" * 40),
        events.encode(stepped(3), 0.0)[:40],
    ]
    path = tmp_path / "events.jsonl"
    path.write_bytes(
        b"".join(g.encode() + b.encode() for g, b in zip(good * 5, bad, strict=False)) + b"\xff\xfe\n"
    )
    reading = events.Reading(path)
    found = [record.event for record in reading.records()]
    assert found == [stepped(at) for at in (*range(4), *range(4), *range(4), *range(4), 0, 1)]
    assert reading.skipped == len(bad)  # half a line is joined with what follows it
    assert list(events.read_events(tmp_path / "none")) == []


def test_lines_of_a_newer_version_are_left_out_and_told_apart(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text(
        events.encode(stepped(0), 0.0).replace('"v":2', '"v":99') + events.encode(stepped(1), 0.0)
    )
    reading = events.Reading(path)
    assert [record.event for record in reading.records()] == [stepped(1)]
    assert (reading.skipped, reading.newer) == (1, 1)


def test_the_first_versions_lines_are_still_read(tmp_path):
    path = tmp_path / "events.jsonl"
    step = stepped(7, mark="00000000000000ff")
    lines = [
        {"v": 1, "kind": "step", "at": 1.5, **vars(step)},
        {"v": 1, "kind": "note", "at": 2, "text": "x"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert list(events.read_events(path)) == [step, events.Noted("x")]
    write(path, [events.Noted("y")])
    assert list(events.read_events(path)) == [step, events.Noted("x"), events.Noted("y")]


def mutated(line, dice):
    """A few bytes of a line changed, put in, taken out, doubled or cut off."""
    changed = bytearray(line)
    for _ in range(dice.randrange(1, 4)):
        at = dice.randrange(len(changed)) if changed else 0
        match dice.randrange(5):
            case 0 if changed:
                changed[at] = dice.randrange(256)
            case 1:
                changed[at:at] = dice.choice(
                    [b"[", b"{", b'"', b"9" * 30, b"-", b"null", b"NaN", b"\n", b","]
                )
            case 2:
                del changed[at : at + dice.randrange(1, 20)]
            case 3:
                changed += changed[at : at + dice.randrange(1, 99)]
            case _ if changed:
                digits = [i for i, byte in enumerate(changed) if 48 <= byte <= 57]
                changed[dice.choice(digits or [0])] = dice.choice(b"0123456789-.e")
    return bytes(changed)


def test_5_000_strange_lines_never_stop_whoever_reads_or_shows_them(tmp_path, capsys):
    dice = random.Random(11)
    lines = events.encode_all(events.Recorded(at, at, event) for at, event in enumerate(EVERYTHING))
    folder = RunFolder(tmp_path)
    folder.create()
    display = Display(folder, 2, "en")
    strange = [mutated(dice.choice(lines.encode().splitlines(keepends=True)), dice) for _ in range(5000)]
    for start in range(0, len(strange), 500):
        with folder.events(0).open("ab") as file:
            file.writelines(strange[start : start + 500])
        display.tick()
        display._step_line() if display._last else None
        display._picture()
    display.close()
    reading = events.Reading(folder.events(0))
    assert len(list(reading.records())) > 100, "some are only a little strange"
    assert reading.skipped > 1000
    assert parts.totals_in(folder.events(0)).next_number >= 0
    assert events.recent_events(folder.events(0))


def test_a_long_record_is_compacted_and_reads_as_before_but_for_the_samples(tmp_path):
    path = tmp_path / "rank-0.jsonl"
    recorded = [team(), events.StorageUsed(0, "s3://b", "weights", 3, 5, 0.1), *map(stepped, range(4000))]
    for start in range(0, len(recorded), 500):
        write(path, recorded[start : start + 500], part_bytes=100_000)
    kept = events.compacted_parts(path)
    assert len(kept) >= 2
    assert path.stat().st_size < 200_000
    assert without_samples(events.read_events(path)) == without_samples(recorded)
    assert list(events.read_events(path))[-1] == recorded[-1], "the end keeps its samples"
    assert all(b'"ids"' not in gzip.decompress(part.read_bytes()) for part in kept)


def test_whoever_goes_on_reads_the_end_only_and_knows_what_came_before(tmp_path, monkeypatch):
    path = tmp_path / "rank-0.jsonl"
    used = events.StorageUsed(0, "s3://b", "weights", 3, 5, 0.1)
    for session in range(3):
        recorded = [used, team(session), *map(stepped, range(3000))]
        recorder = write(path, recorded, part_bytes=50_000)
        assert recorder.storage == (3 * (session + 1), 5 * (session + 1))
    assert len(events.compacted_parts(path)) >= 3
    for part in events.compacted_parts(path):
        part.unlink()  # nobody needs them to go on
    assert events.sessions_in(path) == 3
    assert parts.totals_in(path) == parts.Totals(
        next_number=3 * 3002,
        part=recorder._totals.part,
        session=2,
        steps=20,
        storage_requests=9,
        storage_bytes=15,
    )


def test_a_kill_at_any_moment_of_a_compaction_loses_and_repeats_nothing(tmp_path, monkeypatch):
    for moment in range(3):
        path = tmp_path / f"{moment}" / "rank-0.jsonl"
        path.parent.mkdir()
        recorded = [team(), *map(stepped, range(2000))]
        write(path, recorded)
        before = path.read_bytes()
        totals = parts.totals_in(path)
        parts.compact(path, totals, 0.0)
        if moment == 0:  # killed before the compacted part was there
            events.compacted_parts(path)[0].unlink()
            path.write_bytes(before)
        elif moment == 1:  # killed before the next part was begun
            path.write_bytes(before)
        assert without_samples(events.read_events(path)) == without_samples(recorded)
        recorder = events.Recorder(path)
        recorder.bring_in(events.encode(stepped(2000), 0.0, 2001) + events.encode(stepped(1999), 0.0, 2000))
        recorder.record(events.Noted("next session"))
        recorder.close(60)
        expected = [*recorded, stepped(2000), events.Noted("next session")]
        assert without_samples(events.read_events(path)) == without_samples(expected)
        assert parts.totals_in(path).next_number == len(expected)


def test_what_a_killed_rank_had_not_written_is_brought_in_once(tmp_path):
    path = tmp_path / "rank-0.jsonl"
    first = events.Recorder(path)
    for step in range(10):
        first.record(stepped(step))
    pending = first.unwritten()
    first.flush(60)
    kept = events.encode_all(
        events.Recorded(at, 0.0, stepped(at)) for at in range(5, 13)
    )  # 10-12 were not written
    assert sum(isinstance(e, events.Stepped) for e in events.read_events(path)) == 10
    with path.open("a") as file:
        file.write('{"v":2,"kind":"steps","i":10,')  # killed while it wrote
    for session in range(2):  # the second finds the same state again
        recorder = events.Recorder(path)
        recorder.record(events.Noted(f"early word of session {session}"))
        recorder.bring_in(kept)
        recorder.bring_in(pending())
        recorder.record(team(session))
        recorder.close(60)
    found = list(events.read_events(path))
    assert [event.step for event in found if isinstance(event, events.Stepped)] == list(range(13))
    assert events.Reading(path).skipped == 0
    numbers = [record.number for record in events.Reading(path).records()]
    assert numbers == list(range(17))


def test_a_follower_misses_and_repeats_nothing_while_parts_are_compacted(tmp_path):
    path = tmp_path / "rank-0.jsonl"
    follower = events.Follower(path)
    recorder = events.Recorder(path, part_bytes=20_000, capacity=100_000)
    seen = []
    for step in range(6000):
        recorder.record(stepped(step))
        if step % 50 == 0:
            recorder.flush(60)
        if step % 170 == 0:
            seen += follower.look()
    recorder.close(60)
    for _ in range(3):
        seen += follower.look()
    follower.close()
    assert len(events.compacted_parts(path)) > 5
    # Whole parts that came and went between two looks are not shown; what a look has seen comes once, in order.
    steps = [event.step for event in seen]
    assert steps == sorted(set(steps))
    assert steps[-1] == 5999
    assert len(steps) > 5000


def test_compacted_parts_that_were_tampered_with_are_left_out(tmp_path):
    path = tmp_path / "rank-0.jsonl"
    write(path, [team(), *map(stepped, range(3000))], part_bytes=20_000)
    good = events.compacted_parts(path)
    assert good
    number = int(good[-1].name.split(".")[1])
    (tmp_path / f"rank-0.{number + 1:04d}.jsonl.gz").write_bytes(b"no gzip at all")
    (tmp_path / f"rank-0.{number + 2:04d}.jsonl.gz").write_bytes(good[0].read_bytes()[:200])
    (tmp_path / f"rank-0.{number + 3:04d}.jsonl.gz").write_bytes(
        gzip.compress(bytes(1 << 28))
    )  # unpacks to 256 MB
    (tmp_path / f"rank-0.{number + 4:04d}.jsonl.gz").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / f"rank-0.{number + 5:04d}.jsonl.gz")
    reading = events.Reading(path)
    assert sum(isinstance(record.event, events.Stepped) for record in reading.records()) == 3000
    assert reading.skipped >= 3


def test_a_step_of_a_long_run_takes_at_most_60_bytes(tmp_path):
    dice = random.Random(3)
    path = tmp_path / "rank-0.jsonl"
    recorder = events.Recorder(path, capacity=1 << 20)
    for step in range(60_000):
        recorder.record(
            stepped(
                step,
                loss=2.3 + dice.random(),
                lr=1e-3 * math.cos(step / 1e5),
                grad_norm=1.0 + dice.random(),
                seconds={
                    name: round(about + dice.random() / 1000, 6)
                    for name, about in (
                        ("data", 0.0),
                        ("compute", 0.03),
                        ("exchange", 0.01),
                        ("wait", 0.008),
                        ("update", 0.005),
                    )
                }
                | {"save": 0.0},
            )
        )
        if step % 500 == 0:
            recorder.flush(60)
    recorder.close(60)
    assert recorder.lost == 0
    kept = events.compacted_parts(path)
    steps = sum(
        isinstance(record.event, events.Stepped)
        for part in kept
        for record in events.Reading(part)._of(parts.lines_of_part(part))
    )
    compact = sum(part.stat().st_size for part in kept) / steps
    print(
        f"{compact:.1f} bytes per step of {steps} compacted ones, "
        f"{path.stat().st_size / (60_000 - steps):.0f} of others"
    )
    assert steps > 10_000
    assert compact <= 60


@needs_root
def test_a_full_disk_costs_events_not_the_training(tmp_path, capfd):
    with small_disk(tmp_path / "disk", "64k") as disk:
        path = disk / "events.jsonl"
        write(path, map(stepped, range(5)))
        filler = fill(disk)
        recorder = events.Recorder(path)
        for step in range(5, 300):
            recorder.record(stepped(step))
        recorder.record(events.Noted("something the user should know"))
        recorder.close(60)
        assert recorder.lost > 0
        told = capfd.readouterr().err
        assert told.count("cannot record events") == 1
        assert "No space left" in told
        assert "something the user should know" in told, "nobody will read it in the events"
        filler.unlink()
        write(path, [stepped(400)])  # half a line was not left in its way
        reading = events.Reading(path)
        assert [r.event for r in reading.records()][-1] == stepped(400)
        assert reading.skipped == 0


@needs_root
def test_a_disk_that_hangs_costs_events_not_the_training(tmp_path):
    with disk_that_hangs(tmp_path / "disk", tmp_path / "image") as disk:
        recorder = events.Recorder(disk / "events.jsonl", capacity=50)
        began = time.monotonic()
        for step in range(200):
            recorder.record(stepped(step))
        assert time.monotonic() - began < 60  # waiting for the disk would take for ever
        recorder.close(deadline_seconds=0.2)
        assert recorder.lost > 100
    recorder._thread.join(60)
    assert not recorder._thread.is_alive()


def test_a_pipe_or_a_link_in_place_of_the_file_is_not_written(tmp_path, capfd):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for name in ("pipe", "link"):
        assert write(tmp_path / name, [stepped(0)]).lost == 1
    assert not (tmp_path / "target").exists()
    told = capfd.readouterr().err
    assert "is a symbolic link" in told
    assert "is a pipe" in told


def test_recording_a_step_costs_the_training_thread_under_100_microseconds(tmp_path):
    recorder = events.Recorder(tmp_path / "events.jsonl", capacity=100_000)
    recorder.record(stepped(0))
    costs = []
    for _ in range(20):
        began = time.thread_time()
        for step in range(100):
            recorder.record(stepped(step))
        costs.append((time.thread_time() - began) / 100)
    recorder.close(60)
    print(f"recording: {sorted(costs)[10] * 1e6:.1f} µs of CPU a step")
    assert sorted(costs)[10] < 100e-6
