"""Where a rank's output goes."""

from __future__ import annotations

import os
from pathlib import Path

from dure.base.files import open_own


def open_log(log: Path, *, goes_on: bool = False) -> tuple[int, str]:
    """Open a rank's log to write it; a new one, unless it `goes_on`. Returns its descriptor, and what to tell the user.

    A log that cannot be opened is no reason not to run: the output leads nowhere then.
    """
    fresh = 0 if goes_on else os.O_TRUNC
    try:
        return open_own(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | fresh, 0o644), ""
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        return nowhere, f"{log} cannot be written: {error.strerror}; what this rank prints is not kept"
