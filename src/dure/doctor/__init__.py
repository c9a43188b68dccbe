"""Preflight: what would go wrong on the nodes, found before anything is started on them.

The public names are imported when they are first used: the command line mentions this room, and starts without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dure.doctor.finding import Finding
    from dure.doctor.quick import quick_checks, refuse_bad

__all__ = ["Finding", "quick_checks", "refuse_bad"]

_HOMES = {
    "Finding": "dure.doctor.finding",
    "quick_checks": "dure.doctor.quick",
    "refuse_bad": "dure.doctor.quick",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'dure.doctor' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
