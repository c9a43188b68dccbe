"""The agent's side of a supervisor: it is told the team's key and what to do over its standard input.

ssh passes on no signals, and says nothing when the cable is out; nor does Ray. A supervisor that is not heard of for
`lost_seconds` may have started the run elsewhere: whoever was cut off ends at once, so that there are never two.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

from dure.base.errors import UsageError
from dure.base.lines import LineError, Lines, decode, split
from dure.base.say import say
from dure.base.team_key import TeamKey
from dure.launch.lease import Lease, LeaseOver

KEY = "Key"
"""The first message."""
ALIVE, STOP, KILL = "Alive", "Stop", "Kill"
"""The messages after it: go on; save and end; end at once."""
NODE_LOST = "NodeLost"
"""To the leader, `node` and `why`: the engine knows that a node is lost. Its agent may still be connected."""
BEAT_SECONDS = 1.0
"""How often it says that it is there."""
_END_SECONDS = 5.0
"""After its lease is over an agent has so long to end its ranks in good order."""
_LONGEST = 4096


def obey_input(lost_seconds: float, *, leads: bool) -> tuple[TeamKey, Lease]:
    """Read the team's key from standard input, and from now on do what is said there; the lease tells the rest."""
    supervisor = Lines(0, None, longest=_LONGEST)
    key = _read_key(supervisor, lost_seconds)
    lease = Lease()
    threading.Thread(
        target=_obey, args=(supervisor, lease, lost_seconds, leads), name="dure-attached", daemon=True
    ).start()
    return key, lease


def _read_key(supervisor: Lines, seconds: float) -> TeamKey:
    try:
        name, fields = decode(supervisor.next(seconds))
    except LineError as error:
        raise LeaseOver(f"the supervisor has not sent the team's key: {error}") from None
    try:
        if name == KEY:
            return TeamKey.from_hex(str(fields.get("key")))
    except UsageError:
        pass
    raise LeaseOver("the supervisor has sent something else than the team's key")


def _obey(supervisor: Lines, lease: Lease, lost_seconds: float, leads: bool) -> None:
    why = ""
    is_gone = False
    while not why:
        supervisor.wait(BEAT_SECONDS / 2)
        lines = supervisor.receive()
        orders = {split(line)[0].decode(errors="replace") for line in lines}
        silent = time.monotonic() - supervisor.heard_at
        if KILL in orders:
            why = "the supervisor ended it"
        elif STOP in orders:
            os.kill(os.getpid(), signal.SIGTERM)
        elif silent > lost_seconds:
            why = f"the supervisor has not been heard of for {silent:.0f} s"
        if NODE_LOST in orders:
            _note_lost_nodes(lines, lease)
        if supervisor.closed and not is_gone and not why:
            is_gone = True
            _supervisor_is_gone(lost_seconds, leads)
    lease.end(why)
    time.sleep(_END_SECONDS)  # a thread that ends with the process, if that can still end by itself
    os._exit(LeaseOver.exit_code)


def _note_lost_nodes(lines: list[bytes], lease: Lease) -> None:
    for line in lines:
        with contextlib.suppress(LineError):
            name, fields = decode(line)
            node = fields.get("node")
            if name == NODE_LOST and isinstance(node, int) and node >= 0:
                lease.note_lost(node, str(fields.get("why", "")))


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
