"""The first signal asks the ranks, the second stops at once; without ranks to ask, the first does."""

import os
import signal
import subprocess
import sys
import time

import pytest

from dure.base.errors import StoppedAtOnce
from dure.base.run_folder import RunFolder
from dure.launch.stop import StopSignals
from dure.launch.team import forget_last_run

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def as_in_a_fresh_process():
    """A shell starts what runs in the background with some of them ignored, and tests before this may have set them."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_the_first_signal_asks_once_and_the_second_stops_at_once(number):
    asked = []
    with StopSignals(asked.append) as stop:
        stop.check()
        os.kill(os.getpid(), number)
        stop.check()
        stop.check()
        assert asked == ["Ctrl-C" if number == signal.SIGINT else number.name]
        os.kill(os.getpid(), number)
        with pytest.raises(StoppedAtOnce, match="stopped at once") as stopped:
            stop.check()
    assert stopped.value.exit_code == 128 + number


def test_a_signal_before_there_are_ranks_stops_at_once():
    with StopSignals(lambda name: None) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(StoppedAtOnce):
            stop.check(gently=False)


def test_ranks_that_save_from_some_time_on_are_asked_from_then_on():
    asked, saving = [], []
    with StopSignals(asked.append, can_ask=lambda: bool(saving)) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        stop.check()  # nobody's business: a stock script has its own use for it
        assert stop.received is None
        saving.append(True)
        os.kill(os.getpid(), signal.SIGUSR1)
        stop.check()
        assert asked == ["SIGUSR1"]
    saving.clear()
    with StopSignals(asked.append, can_ask=lambda: bool(saving)) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(StoppedAtOnce, match=r"^stopped by Ctrl-C"):
            stop.check()
    assert asked == ["SIGUSR1"]


def test_a_hang_up_asks_too_and_a_second_one_is_the_same_closed_terminal():
    asked = []
    with StopSignals(asked.append) as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        stop.check()
        os.kill(os.getpid(), signal.SIGHUP)
        stop.check()
        assert asked == ["SIGHUP"]
        assert stop.asked_at is not None
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(StoppedAtOnce, match="stopped at once by SIGTERM"):
            stop.check()


def test_sigquit_is_never_gentle():
    with StopSignals(lambda name: None) as stop:
        os.kill(os.getpid(), signal.SIGQUIT)
        with pytest.raises(StoppedAtOnce):
            stop.check()


@pytest.mark.parametrize("ask", [None, lambda name: None])
def test_signals_that_mean_nothing_to_the_launcher_do_not_kill_it(ask):
    with StopSignals(ask) as stop:
        os.kill(os.getpid(), signal.SIGUSR2)
        if ask is None:
            os.kill(os.getpid(), signal.SIGUSR1)
        stop.check()
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_one_within_another_asks_the_ranks_for_all_that_it_can():
    asked = []
    with StopSignals(), StopSignals(asked.append) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        stop.check()
        assert asked == ["SIGUSR1"]


def test_output_to_a_closed_terminal_goes_nowhere():
    code = """if True:
        import os, pty, signal, sys
        from dure.launch.stop import StopSignals
        ours, theirs = pty.openpty()
        os.dup2(theirs, 1); os.dup2(theirs, 2); os.close(theirs)
        with StopSignals(lambda name: None) as stop:
            os.close(ours)
            os.kill(os.getpid(), signal.SIGHUP)
            stop.check()
            print("nobody reads this", flush=True)
            print("nor this", file=sys.stderr, flush=True)
    """
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=300).returncode == 0


def test_a_wish_to_stop_that_is_older_than_this_launch_is_forgotten_and_a_newer_one_is_not(tmp_path):
    folder = RunFolder(tmp_path)
    folder.create()
    folder.stop.touch()
    forget_last_run(folder, 1)
    assert folder.stop.exists()
    long_ago = time.time() - 1e6
    os.utime(folder.stop, (long_ago, long_ago))
    forget_last_run(folder, 1)
    assert not folder.stop.exists()
