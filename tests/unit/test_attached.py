"""An agent under a supervisor: the key comes over standard input, and the lease ends when it must."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from dure.base.lines import encode
from dure.base.team_key import TeamKey
from dure.engine.attached import ALIVE, KEY, KILL, STOP
from dure.launch.lease import LeaseOver

AGENT = """
import signal, sys, time
from dure.engine import attached
from dure.launch.lease import LeaseOver
attached._END_SECONDS = 0.5
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append("asked to save"))
try:
    key, lease = attached.obey_input(float(sys.argv[1]), leads=sys.argv[2] == "leads")
    print(key.derived("test").hex(), flush=True)
    while True:
        time.sleep(0.02)
        while asked:
            print(asked.pop(), flush=True)
        if sys.argv[3] != "stuck":
            lease.check()
except LeaseOver as over:
    print(over, flush=True)
    sys.exit(over.exit_code)
"""


class Agent:
    """A process that does what standard input says."""

    def __init__(self, lost_seconds=60.0, leads=False, stuck=False):
        words = [str(lost_seconds), "leads" if leads else "follows", "stuck" if stuck else "free"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", AGENT, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait(60)
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                stream.close()

    def tell(self, *lines):
        self.process.stdin.write("".join(line.decode() for line in lines))
        self.process.stdin.flush()

    def hears(self):
        return self.process.stdout.readline().strip()

    def ends(self):
        """Its exit code, and what it printed since."""
        code = self.process.wait(120)
        return code, self.process.stdout.read()


@pytest.fixture
def key():
    return TeamKey.random()


def test_the_key_comes_over_standard_input_and_is_to_be_seen_nowhere(key):
    with Agent() as agent:
        agent.tell(encode(KEY, {"key": key.hex()}), encode(ALIVE))
        assert agent.hears() == key.derived("test").hex()
        for place in ("cmdline", "environ"):
            assert key.hex().encode() not in Path(f"/proc/{agent.process.pid}/{place}").read_bytes()


def test_a_supervisor_that_falls_silent_ends_the_lease(key):
    with Agent(lost_seconds=1.0) as agent:
        agent.tell(encode(KEY, {"key": key.hex()}))
        agent.hears()
        code, said = agent.ends()
        assert code == LeaseOver.exit_code
        assert "the supervisor has not been heard of for" in said


def test_told_to_end_it_ends_at_once_and_asks_nobody(key):
    with Agent() as agent:
        agent.tell(encode(KEY, {"key": key.hex()}), encode(KILL))
        agent.hears()
        assert agent.ends() == (
            LeaseOver.exit_code,
            "the supervisor ended it; the ranks of this node are ended\n",
        )


def test_told_to_stop_it_has_the_ranks_save(key):
    with Agent() as agent:
        agent.tell(encode(KEY, {"key": key.hex()}), encode(ALIVE), encode(STOP))
        agent.hears()
        assert agent.hears() == "asked to save"
        assert agent.process.poll() is None


@pytest.mark.parametrize("leads", [True, False])
def test_when_the_connection_closes_only_the_leader_has_the_run_save_and_both_end(key, leads):
    with Agent(lost_seconds=1.0, leads=leads) as agent:
        agent.tell(encode(KEY, {"key": key.hex()}), encode(ALIVE))
        agent.hears()
        agent.process.stdin.close()
        code, said = agent.ends()
        assert code == LeaseOver.exit_code
        assert ("asked to save" in said) is leads


def test_an_agent_that_cannot_look_at_its_lease_is_ended_all_the_same(key):
    with Agent(lost_seconds=0.5, stuck=True) as agent:
        agent.tell(encode(KEY, {"key": key.hex()}))
        agent.hears()
        assert agent.ends()[0] == LeaseOver.exit_code


@pytest.mark.parametrize("first", ["", "Alive {}\n", "Key {}\n", "Key\n", 'Key {"key": 3}\n', "x" * 100_000])
def test_without_a_key_nothing_starts(first):
    with Agent(lost_seconds=1.0) as agent:
        with contextlib.suppress(OSError):  # it may have ended already
            agent.process.stdin.write(first)
            agent.process.stdin.close()
        code, said = agent.ends()
        assert code == LeaseOver.exit_code
        assert "key" in said
