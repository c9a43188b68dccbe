"""What all tests share."""

import re
import signal
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, settings
from support.test_groups import group_of, rank_of_group

# The same examples every time, and no limit to how long one takes: whether a change lands must not depend on dice or on
# how busy a machine is. `pytest --hypothesis-profile=default` goes and looks for new ones.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")

# A shell starts what it puts in the background with Ctrl-C ignored, nohup what it starts with hanging up ignored, and
# children inherit that. Tests of these signals need them obeyed, as they are in a terminal.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What takes longest first, and what is short last: workers that take groups from one list end together."""
    items.sort(key=lambda item: rank_of_group(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Workers take groups: a file, or several files that share what is made once for all of them."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return group_of(nodeid)

    return ByGroup(config, log)


@pytest.fixture(scope="session")
def storage(tmp_path_factory):
    """The demo's shared storage, drawn once for all tests."""
    from dure.tools.demo import prepare

    folder = tmp_path_factory.mktemp("shared")
    prepare(folder, 4)
    return folder


@pytest.fixture(scope="session")
def script_alone(storage):
    """The fingerprint that `python ddp.py` ends with: one rank, which nobody launched."""
    ran = subprocess.run(
        [sys.executable, storage / "ddp.py"], capture_output=True, text=True, timeout=500, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"epoch 0: loss 0\.\d+", ran.stdout)
    (fingerprint,) = re.findall(r"rank 0 of 1: (\w{16})", ran.stdout)
    return fingerprint
