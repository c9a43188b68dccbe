"""dure: one PyTorch model on many processes, every replica the same bit for bit, and provably so.

The public names are imported when they are first used, so that `dure --help` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dure.batches import Batch, Batches
    from dure.evaluation import Judged
    from dure.team import Team, start
    from dure.world import World, arguments

__version__ = "0.1.0"
__all__ = ["Batch", "Batches", "Judged", "Team", "World", "__version__", "arguments", "start"]

_HOMES = {
    "Batch": "dure.batches",
    "Batches": "dure.batches",
    "Judged": "dure.evaluation",
    "Team": "dure.team",
    "World": "dure.world",
    "arguments": "dure.world",
    "start": "dure.team",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'dure' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
