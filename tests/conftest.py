"""What all tests share."""

import signal

import pytest

# A shell starts what it puts in the background with Ctrl-C ignored, nohup what it starts with hanging up ignored, and
# children inherit that. Tests of these signals need them obeyed, as they are in a terminal.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def storage(tmp_path_factory):
    """The demo's shared storage, drawn once for all tests."""
    from dure.demo import prepare

    folder = tmp_path_factory.mktemp("shared")
    prepare(folder, 4)
    return folder
