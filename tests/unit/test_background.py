"""Work beside the step: one thing at a time, at a lower priority where asked, and its errors are not lost."""

import os
import threading

import pytest
import torch

from dure.checkpoint.snapshot import Background, make_present


@pytest.mark.parametrize("gives_way", [True, False])
def test_it_is_done_in_one_thread_that_may_give_way_to_training(gives_way):
    background, found = Background("test", gives_way=gives_way), []

    def look():
        found.append((threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))

    for _ in range(3):
        background.begin(look)
        assert background.wait(240)
        assert not background.busy
    assert len(set(found)) == 1
    thread, priority = found[0]
    assert thread != threading.get_native_id()
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    # Where the tests themselves run at a low priority, a thread cannot be much lower.
    assert priority == max(own, 10) if gives_way else priority == own


def test_a_wait_has_a_deadline_and_one_thing_is_done_at_a_time():
    background, go = Background("test"), threading.Event()
    assert background.wait(0), "nothing was begun"

    def wait_to_go():
        assert go.wait(240)

    background.begin(wait_to_go)
    assert background.busy
    assert not background.wait(0.01)
    with pytest.raises(AssertionError, match="one thing at a time"):
        background.begin(print)
    go.set()
    assert background.wait(240)


def test_an_error_is_raised_by_whoever_waits():
    background = Background("test")

    def fail():
        raise OSError("no more room")

    background.begin(fail)
    with pytest.raises(OSError, match="no more room"):
        background.wait(240)
    assert background.wait(240), "once"


def test_memory_that_is_made_present_keeps_what_it_holds():
    whole = torch.arange(100_000)
    make_present([whole[3:90_000], whole[:0]])
    assert torch.equal(whole, torch.arange(100_000))
