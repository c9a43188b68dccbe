"""Waiting for a peer's counter ends when it has counted, and when it cannot count any more."""

import mmap
import os
import subprocess
import sys

import pytest

from dure.base.errors import PeerLost
from dure.comm.shm_barrier import ShmCounters, line_bytes
from dure.comm.shm_segment import SharedSegment


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
