"""Waiting for a peer's counter ends when it has counted, and when it cannot count any more."""

import contextlib
import mmap
import os
import platform
import subprocess
import sys
import threading

import pytest

from dure.base.errors import PeerLost
from dure.comm import shm_barrier
from dure.comm.group import Group
from dure.comm.shm_barrier import ShmBarrier, ShmCounters, barrier_bytes, line_bytes
from dure.comm.shm_segment import SharedSegment, share_or_none


@pytest.fixture
def of_the_dead():
    """Counters of this process, rank 0, and of rank 1, which has ended."""
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as peer:
        shared = SharedSegment(mmap.mmap(-1, line_bytes(2)), 0, (os.getpid(), peer.pid), ((0, 1),), None)
        counters = ShmCounters(shared, 240.0)
        peer.kill()
    yield counters
    counters.close()


def test_a_peer_that_ended_without_counting_is_named(of_the_dead):
    with pytest.raises(PeerLost, match=r"rank 0 lost rank 1 in a test: process \d+ is gone"):
        of_the_dead.wait(1, 3, 1, "a test")


def test_a_peer_that_counted_and_ended_since_the_last_look_is_not_lost(of_the_dead):
    def count():
        of_the_dead.values[1, 3] = 1

    of_the_dead.wait(1, 3, 1, "a test", look=count)


def private(ranks=2):
    """A segment as two ranks would share it, both of them this process."""
    return SharedSegment(
        mmap.mmap(-1, line_bytes(2)), 0, (os.getpid(),) * ranks, (tuple(range(ranks)),), None
    )


@pytest.fixture(params=["compiled", "x86_64 without a compiler"])
def way(request, monkeypatch):
    """Both ways to count."""
    if request.param == "compiled":
        if shm_barrier._compiled() is None:
            pytest.skip("dure was installed without a C compiler")
    else:
        if platform.machine() != "x86_64":
            pytest.skip("Python counts only where plain stores are kept in order")
        monkeypatch.setattr(shm_barrier, "_compiled", lambda: None)


@pytest.mark.usefixtures("way")
def test_what_was_written_before_a_barrier_is_read_after_it_each_of_4_000_times():
    with barrier_of_two() as (mine, its):
        wrong = []

        def run(barrier):
            for turn in range(2_000):
                barrier.board[barrier.rank, 0] = turn
                barrier.wait("a test")
                if barrier.board[1 - barrier.rank, 0] != turn:
                    wrong.append(turn)
                if barrier.agree(1 << barrier.rank, "a test") != 3:
                    wrong.append(turn)

        other = threading.Thread(target=run, args=(its,))
        other.start()
        run(mine)
        other.join(60)
        assert wrong == []


@contextlib.contextmanager
def barrier_of_two():
    memory = mmap.mmap(-1, barrier_bytes(2, 1))
    pids = (os.getpid(),) * 2
    both = [ShmBarrier(SharedSegment(memory, rank, pids, ((0, 1),), None), 1, 60.0) for rank in range(2)]
    yield both
    for barrier in both:
        barrier.close()


@pytest.mark.usefixtures("way")
def test_a_late_peer_is_named_when_the_deadline_has_passed(monkeypatch):
    monkeypatch.setattr(shm_barrier, "LOOK_SECONDS", 0.01)
    counters = ShmCounters(private(), 0.05)
    with pytest.raises(
        PeerLost, match=r"rank 0 waited 0\.05 s for rank 1 in a test; it lives, but never came"
    ):
        counters.arrive_and_wait(1, "a test")
    counters.close()


def test_other_machines_share_memory_only_with_the_compiled_barrier(monkeypatch, capsys):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    if shm_barrier._compiled() is not None:
        ShmCounters(private(), 1.0).close()
    monkeypatch.setattr(shm_barrier, "_compiled", lambda: None)
    with pytest.raises(OSError, match="was not compiled"):
        ShmCounters(private(), 1.0)
    ShmCounters(private(ranks=1), 1.0).close()
    made = share_or_none(
        Group(None, 0, 1), lambda: ShmBarrier(private(), 0, 1.0), "gradients go over Gloo, same bits"
    )
    said = capsys.readouterr()
    assert made is None
    assert "rank 0 cannot share memory (the shared-memory barrier was not compiled" in said.out + said.err
    assert (
        "aarch64 needs it: install a C compiler, then dure again); gradients go over Gloo"
        in said.out + said.err
    )
