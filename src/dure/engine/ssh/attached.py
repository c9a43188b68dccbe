"""The agent's side of a supervisor: it is told the team's key and what to do over its standard input.

ssh passes on no signals, and says nothing when the cable is out. A supervisor that is not heard of for
`lost_seconds` may have started the run elsewhere: whoever was cut off ends at once, so that there are never two.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time

from dure.base.errors import UsageError
from dure.base.say import say
from dure.base.team_key import TeamKey
from dure.launch.lease import Lease, LeaseOver

KEY = "key"
"""The first word of the first line; the team's key follows."""
ALIVE, STOP, KILL = "alive", "stop", "kill"
"""What a supervisor may say then: go on; save and end; end at once."""
BEAT_SECONDS = 1.0
"""How often it says that it is there."""
_END_SECONDS = 5.0
"""After its lease is over an agent has so long to end its ranks in good order."""
_LONGEST = 4096


def obey_input(lost_seconds: float, *, leads: bool) -> tuple[TeamKey, Lease]:
    """Read the team's key from standard input, and from now on do what is said there; the lease tells the rest."""
    key = _read_key(lost_seconds)
    lease = Lease()
    threading.Thread(
        target=_obey, args=(lease, lost_seconds, leads), name="dure-attached", daemon=True
    ).start()
    return key, lease


def _read_key(seconds: float) -> TeamKey:
    """The first line, byte by byte: what follows it is for the thread."""
    deadline = time.monotonic() + seconds
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([0], [], [], max(0.0, deadline - time.monotonic()))
        byte = os.read(0, 1) if ready else b""
        if not byte or len(line) > _LONGEST:
            raise LeaseOver("the supervisor has not sent the team's key, and is gone")
        line += byte
    word, _, text = line.decode(errors="replace").strip().partition(" ")
    try:
        if word == KEY:
            return TeamKey.from_hex(text)
    except UsageError:
        pass
    raise LeaseOver("the supervisor has sent something else than the team's key")


def _obey(lease: Lease, lost_seconds: float, leads: bool) -> None:
    why = ""
    heard_at = time.monotonic()
    rest = b""
    is_open = True
    while not why:
        ready, _, _ = select.select([0] if is_open else [], [], [], BEAT_SECONDS / 2)
        silent = time.monotonic() - heard_at
        if not ready:
            why = f"the supervisor has not been heard of for {silent:.0f} s" if silent > lost_seconds else ""
            continue
        try:
            chunk = os.read(0, _LONGEST)
        except OSError:
            chunk = b""
        if not chunk:
            is_open = False
            _supervisor_is_gone(lost_seconds, leads)
            continue
        heard_at = time.monotonic()
        *lines, rest = (rest + chunk[-_LONGEST:]).split(b"\n")
        words = {line.decode(errors="replace") for line in lines}
        if KILL in words:
            why = "the supervisor ended it"
        elif STOP in words:
            os.kill(os.getpid(), signal.SIGTERM)
    lease.end(why)
    time.sleep(_END_SECONDS)  # a thread that ends with the process, if that can still end by itself
    os._exit(LeaseOver.exit_code)


def _supervisor_is_gone(lost_seconds: float, leads: bool) -> None:
    """Its end of the connection is closed: it has ended, or only its connection with this node has.

    Nobody here can tell which. If it has ended, the leader's agent knows it too, and has all nodes save. If it lives,
    it has given this node up, and this node must not ask the others for anything.
    """
    if leads:
        os.kill(os.getpid(), signal.SIGTERM)
    with contextlib.suppress(OSError):  # standard error may be gone with it
        what = "the run saves and ends, if it can" if leads else "this node waits for what the leader says"
        say(f"the supervisor is gone; within {lost_seconds:.0f} s {what}")
