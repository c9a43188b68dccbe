"""The agent's side of a supervisor: it is told what to do over its standard input.

ssh passes on no signals. A supervisor that is gone, or whose connection is, closes the input: then nobody is
left to want this run here, so that it saves and ends.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

STOP, KILL = "stop", "kill"
"""What a supervisor may say: save and end; end at once."""
_SAVE_SECONDS = 60.0


def obey_input() -> None:
    """From now on, do what standard input says."""
    threading.Thread(target=_obey, name="dure-attached", daemon=True).start()


def _obey() -> None:
    for line in sys.stdin:
        if line.strip() == STOP:
            os.kill(os.getpid(), signal.SIGTERM)
        elif line.strip() == KILL:
            _end_at_once()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_SAVE_SECONDS)
    _end_at_once()


def _end_at_once() -> None:
    for _ in range(2):  # the first asks to save, the second does not wait for it
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
