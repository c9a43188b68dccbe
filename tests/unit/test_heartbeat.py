"""What a rank last said is in its heartbeat file, whatever becomes of the rank."""

import mmap
import os
import struct
import subprocess
import sys
import time

import pytest

from dure.observe.heartbeat import Beat, Heartbeat, Phase, read_beat


def test_the_last_beat_is_read_back(tmp_path):
    heartbeat = Heartbeat(tmp_path / "rank-0")
    before = time.monotonic_ns()
    heartbeat.beat(3, Phase.DATA)
    heartbeat.beat(17, Phase.COMPUTE)
    beat = read_beat(tmp_path / "rank-0")
    assert beat is not None
    assert (beat.step, beat.phase, beat.pid) == (17, Phase.COMPUTE, os.getpid())
    assert before <= beat.at_ns <= time.monotonic_ns()


def test_the_last_beat_outlives_the_writer(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; from dure.observe.heartbeat import Heartbeat, Phase\n"
        "Heartbeat(Path(sys.argv[1])).beat(5, Phase.EXCHANGE); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "p")], check=False, timeout=300)
    beat = read_beat(tmp_path / "p")
    assert beat is not None
    assert (beat.step, beat.phase) == (5, Phase.EXCHANGE)


def test_no_file_an_empty_file_and_no_beat_yet_read_as_nothing(tmp_path):
    assert read_beat(tmp_path / "missing") is None
    (tmp_path / "empty").touch()
    assert read_beat(tmp_path / "empty") is None
    Heartbeat(tmp_path / "silent")
    assert read_beat(tmp_path / "silent") is None


def test_a_half_written_beat_is_not_believed(tmp_path):
    path = tmp_path / "p"
    Heartbeat(path).beat(1, Phase.UPDATE)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        struct.pack_into("<q", mapped, 0, 2)  # the first copy has the next step, the second has not
    assert read_beat(path) is None


def test_beats_go_nowhere_without_a_path_or_a_place(tmp_path):
    for heartbeat in (Heartbeat(None), Heartbeat(tmp_path / "no" / "such" / "folder")):
        heartbeat.beat(1, Phase.DATA)
        heartbeat.close()
        heartbeat.beat(2, Phase.DATA)


def test_beats_go_nowhere_when_the_bytes_cannot_be_reserved(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)  # a store into the mapping would be a SIGBUS
    heartbeat = Heartbeat(tmp_path / "p")
    heartbeat.beat(1, Phase.DATA)
    assert read_beat(tmp_path / "p") is None


def test_a_second_writer_goes_on_where_the_first_left_off(tmp_path):
    Heartbeat(tmp_path / "p").beat(4, Phase.DATA)
    second = Heartbeat(tmp_path / "p")
    assert read_beat(tmp_path / "p") is not None
    second.beat(5, Phase.DONE)
    assert read_beat(tmp_path / "p") == Beat(5, Phase.DONE, read_beat(tmp_path / "p").at_ns, os.getpid())


@pytest.mark.parametrize("phase", list(Phase))
def test_every_phase_comes_back(tmp_path, phase):
    Heartbeat(tmp_path / "p").beat(0, phase)
    assert read_beat(tmp_path / "p").phase is phase
