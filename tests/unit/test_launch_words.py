"""The first cause is named, and who waits for whom is said."""

import subprocess
import sys
import time

from dure.base.errors import NotFinite, PeerLost, RankFailed
from dure.launch.failure import describe, ended_without_report, exit_words, first_cause, is_aftermath
from dure.launch.hang import RankState, who_waits_for_whom
from dure.observe.heartbeat import Beat, Phase


def words(error, rank=0):
    try:
        raise error
    except type(error) as caught:
        return describe(caught, rank)


def state(rank, phase, step=17, state="S", seconds=60.0):
    return RankState(rank, Beat(step, phase, int((1000 - seconds) * 1e9), 100 + rank), state)


def blame(*states):
    return who_waits_for_whom(states, int(1000e9), 940.0)


def test_a_signal_comes_before_an_earlier_exception(tmp_path):
    killed = ended_without_report(3, -9, tmp_path / "log", at_ns=1 << 62)
    assert first_cause([words(ValueError("x")), killed]).rank == 3
    left = ended_without_report(3, 7, tmp_path / "log", at_ns=1 << 62)
    assert first_cause([words(ValueError("x")), left]).rank == 0


def test_the_earliest_exception_that_is_not_aftermath_is_the_cause():
    lost = words(PeerLost("rank 2 is gone"))
    first, second = words(ValueError("a"), 2), words(ValueError("b"), 1)
    assert lost.aftermath
    assert first_cause([lost, second, first]).rank == 2


def test_lost_connections_are_aftermath_and_other_errors_are_not():
    gloo = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4")
    wrapped = ValueError("the exchange failed")
    wrapped.__cause__ = gloo
    assert is_aftermath(gloo)
    assert is_aftermath(wrapped)
    assert is_aftermath(ConnectionResetError())
    assert not is_aftermath(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_our_own_errors_keep_their_words_and_exit_code_without_a_traceback():
    error = RankFailed(words(NotFinite("loss is nan at step 3"), 1))
    assert str(error) == "loss is nan at step 3"
    assert (error.rank, error.exit_code, error.details) == (1, 1, "")


def test_ends_without_a_word_are_told_apart():
    assert "SIGKILL: out of memory, or someone's kill -9" in exit_words(-9)
    assert "SIGSEGV" in exit_words(-11)
    assert "exit code 7" in exit_words(7)
    assert "signal 40" in exit_words(-40)


def test_the_one_that_computes_is_to_blame_and_the_others_wait_for_it():
    exchange = [state(rank, Phase.EXCHANGE) for rank in (0, 1, 3)]
    message, rank = blame(*exchange[:2], state(2, Phase.COMPUTE, state="T"), exchange[2])
    assert rank == 2
    assert message == (
        "rank 2 has been in COMPUTE of step 17 for 60 s (stopped); "
        "ranks 0, 1, 3 wait for it in the exchange of step 17."
    )


def test_a_rank_stopped_in_the_exchange_is_to_blame_not_its_peers():
    message, rank = blame(state(0, Phase.EXCHANGE), state(1, Phase.EXCHANGE, state="T"))
    assert rank == 1
    assert "rank 0 waits for it" in message


def test_ranks_in_an_earlier_exchange_hold_up_the_others():
    message, rank = blame(state(0, Phase.EXCHANGE, step=8), state(1, Phase.EXCHANGE, step=7))
    assert rank == 1
    assert "rank 0 waits for it in the exchange of step 8" in message


def test_when_all_wait_nobody_is_said_to_come():
    message, _ = blame(state(0, Phase.EXCHANGE), state(1, Phase.EXCHANGE))
    assert message.startswith("ranks 0, 1 have been in the exchange of step 17 for 60 s, and nobody comes")


def test_a_rank_that_never_beat_is_starting():
    message, rank = who_waits_for_whom([RankState(0, None, "R")], time.monotonic_ns(), time.monotonic() - 5)
    assert rank == 0
    assert "STARTING" in message


def test_importing_the_launcher_does_not_import_torch():
    code = "import sys, dure.launch.agent, dure.launch.hang; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=300).returncode == 0
