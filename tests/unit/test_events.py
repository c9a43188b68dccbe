"""What happened is recorded off the training thread; a disk that refuses never stops training."""

import time

import pytest

from dure import events


def stepped(step):
    return events.Stepped(
        epoch=0,
        step=step,
        loss=0.5,
        samples=8,
        samples_of_batch=32,
        seconds={"data": 0.001, "compute": 0.1, "exchange": 0.01, "update": 0.01},
        lr=1e-3,
        grad_norm=None,
        ids=tuple(range(8)),
        mark="00000000000000ff",
    )


def test_events_come_back_as_they_were(tmp_path):
    path = tmp_path / "events.jsonl"
    recorder = events.Recorder(path)
    recorded = [
        events.TeamFormed(0, 2, 8, 1, "cpu", "host", 1, True, "abc", 10, 400, 20),
        *map(stepped, range(5)),
        events.Proved(4, "f00", True),
        events.Evaluated(4, {"accuracy": 1.0}, 50, 100, "00"),
        events.StorageUsed(0, "s3://bucket/job", "weights", 12, 1 << 33, 0.25),
        events.Noted("hello"),
        events.Ended(5, "f00", "sha"),
    ]
    for event in recorded:
        recorder.record(event)
    recorder.close()
    assert list(events.read_events(path)) == recorded
    assert recorder.lost == 0


def test_half_a_line_ends_the_reading(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text(events.encode(stepped(0), 0.0) + events.encode(stepped(1), 0.0)[:40])
    assert list(events.read_events(path)) == [stepped(0)]
    assert list(events.read_events(tmp_path / "none")) == []


def test_a_newer_schema_is_refused(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text(events.encode(stepped(0), 0.0).replace('"v": 1', '"v": 99'))
    with pytest.raises(ValueError, match="newer dure"):
        list(events.read_events(path))


def test_a_full_disk_costs_events_not_the_training(tmp_path, capfd):
    path = tmp_path / "events.jsonl"
    path.symlink_to("/dev/full")
    recorder = events.Recorder(path)
    for step in range(20):
        recorder.record(stepped(step))
    recorder.close()
    assert recorder.lost == 20
    told = capfd.readouterr().err
    assert told.count("cannot record events") == 1
    assert "No space left" in told


def test_a_disk_that_hangs_costs_events_not_the_training(tmp_path):
    import os

    path = tmp_path / "fifo"  # nobody reads it: opening it for writing waits for ever
    os.mkfifo(path)
    recorder = events.Recorder(path, capacity=50)
    began = time.monotonic()
    for step in range(200):
        recorder.record(stepped(step))
    assert time.monotonic() - began < 60  # waiting for the disk would take for ever
    recorder.close(deadline_seconds=0.2)
    assert recorder.lost > 100
    os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))


def test_recording_a_step_costs_the_training_thread_under_100_microseconds(tmp_path):
    recorder = events.Recorder(tmp_path / "events.jsonl", capacity=100_000)
    recorder.record(stepped(0))
    costs = []
    for _ in range(20):
        began = time.thread_time()
        for step in range(100):
            recorder.record(stepped(step))
        costs.append((time.thread_time() - began) / 100)
    recorder.close()
    print(f"recording: {sorted(costs)[10] * 1e6:.1f} µs of CPU a step")
    assert sorted(costs)[10] < 100e-6
