"""The agent's side of a supervisor: it is told what to do over its standard input, and that somebody is there.

ssh passes on no signals, and says nothing when the cable is out. A supervisor that is not heard of for
`lost_seconds` may have started the run elsewhere: whoever was cut off ends at once, so that there are never two.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time

from dure.say import say

ALIVE, STOP, KILL = "alive", "stop", "kill"
"""What a supervisor may say: go on; save and end; end at once."""
BEAT_SECONDS = 1.0
"""How often it says that it is there."""
_SAVE_SECONDS = 60.0


def obey_input(lost_seconds: float) -> None:
    """From now on, do what standard input says."""
    threading.Thread(target=_obey, args=(lost_seconds,), name="dure-attached", daemon=True).start()


def _obey(lost_seconds: float) -> None:
    heard_at = time.monotonic()
    rest = b""
    while True:
        ready, _, _ = select.select([0], [], [], BEAT_SECONDS / 2)
        now = time.monotonic()
        if not ready:
            if now - heard_at > lost_seconds:
                say(f"the supervisor has not been heard of for {now - heard_at:.0f} s; this node ends")
                _end_at_once()
                return
            continue
        heard_at = now
        chunk = os.read(0, 4096)
        if not chunk:
            break
        *lines, rest = (rest + chunk).split(b"\n")
        words = {line.decode(errors="replace") for line in lines}
        if KILL in words:
            _end_at_once()
            return
        if STOP in words:
            os.kill(os.getpid(), signal.SIGTERM)
    say("the supervisor is gone; this node saves and ends")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_SAVE_SECONDS)
    _end_at_once()


def _end_at_once() -> None:
    # Not SIGTERM or SIGHUP: they ask all nodes to save, by a file on storage that may be reached although the cable is
    # out.
    os.kill(os.getpid(), signal.SIGQUIT)
