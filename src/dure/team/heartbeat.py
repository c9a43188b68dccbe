"""A heartbeat for scripts that have no team: their launcher sees that they move, and how far they are."""

from __future__ import annotations

import functools
import os

from dure.comm.topology import read_run_folder, read_topology
from dure.observe.heartbeat import Heartbeat, Phase


def heartbeat(step: int | None = None) -> None:
    """Tell the launcher that this rank is alive, and in which step it is; under another launcher it does nothing.

    With `dure run --hang-seconds S`, a team of which no rank beats for S seconds is taken for hung. A new step is
    progress: restarts count from there. `team.step` beats by itself.
    """
    beats = _own(os.getpid())
    beats.beat(beats.last[0] if step is None else step, Phase.COMPUTE)


@functools.cache
def _own(pid: int) -> Heartbeat:
    """This process's; a child of it must not beat in its parent's name."""
    run = read_run_folder(os.environ)
    topology = read_topology(os.environ) if run is not None else None
    if run is None or topology is None or topology.launcher != "dure":
        return Heartbeat(None)
    return Heartbeat(run.heartbeat(topology.rank))
