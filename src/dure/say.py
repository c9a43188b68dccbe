"""What dure tells its user: a line on standard error, never on standard output, which belongs to results."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Tell the user, in one write: lines of several processes would mix otherwise."""
    sys.stderr.write(f"dure: {text}\n")
    sys.stderr.flush()
