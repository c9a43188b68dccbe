"""A cluster on one machine: nodes that are namespaces, joined by a switch, with shared storage.

The public names are imported when they are first used: the command line mentions this room, and starts without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dure.tools.lab.lab import Lab
    from dure.tools.lab.machine import why_not_here

__all__ = ["Lab", "why_not_here"]

_HOMES = {"Lab": "dure.tools.lab.lab", "why_not_here": "dure.tools.lab.machine"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'dure.tools.lab' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
