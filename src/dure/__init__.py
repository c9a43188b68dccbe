"""dure: one PyTorch model on many processes, every replica the same bit for bit, and provably so.

The public names are imported when they are first used, so that `dure --help` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dure.comm.topology import Topology, arguments
    from dure.data.batches import Batch, Batches
    from dure.step.evaluation import EvalResult
    from dure.team import Checkpoint, Team, attach, start
    from dure.team.heartbeat import heartbeat

__version__ = "0.1.0"
__all__ = [
    "Batch",
    "Batches",
    "Checkpoint",
    "EvalResult",
    "Team",
    "Topology",
    "__version__",
    "arguments",
    "attach",
    "heartbeat",
    "start",
]

_HOMES = {
    "Batch": "dure.data.batches",
    "Batches": "dure.data.batches",
    "Checkpoint": "dure.team.checkpoint",
    "EvalResult": "dure.step.evaluation",
    "Team": "dure.team",
    "Topology": "dure.comm.topology",
    "arguments": "dure.comm.topology",
    "attach": "dure.team",
    "heartbeat": "dure.team.heartbeat",
    "start": "dure.team",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'dure' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
