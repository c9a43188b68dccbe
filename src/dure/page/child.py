"""The page as a process of its own beside a run: nothing waits for it, and it may end at any time."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

_END_SECONDS = 5.0


class PageProcess:
    """Started when made. It says its address itself; it ends with this process, whatever happens to that."""

    def __init__(self, run: Path) -> None:
        command = [sys.executable, "-m", "dure", "page", str(run), f"--with-parent={os.getpid()}"]
        # A session of its own: Ctrl-C is for the run, which ends the page when it has ended itself.
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def wait(self) -> None:
        """Until it ends, or the user has seen enough."""
        with contextlib.suppress(KeyboardInterrupt):
            self._process.wait()

    def end(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
