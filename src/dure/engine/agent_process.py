"""An agent as a child process: told and heard over pipes, here or at the other end of ssh."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from dure.base.lines import LONGEST, Lines, Splitter, encode
from dure.base.team_key import TeamKey
from dure.engine.attached import ALIVE, BEAT_SECONDS, KEY

PASSED_ON = ("PYTHONPATH", "LANG", "LC_ALL", "NO_COLOR", "AWS_ENDPOINT_URL", "AWS_PROFILE", "AWS_REGION")
"""Variables that an agent elsewhere has as we have them."""


class AgentProcess:
    """A command that becomes an agent. Every line that it prints is passed on."""

    def __init__(
        self,
        command: Sequence[str],
        start: bytes,
        key: TeamKey,
        on_line: Callable[[str, bool], None],
        *,
        beats: bool = True,
        folder: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """`on_line` gets each line, and whether it came over standard output; in a thread of ours.

        `start` is the first message to it. The key goes over standard input, too: arguments and variables can be seen
        by others. `beats`: whether it is told all the time that we are there; otherwise the caller does it.
        """
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=environ,
            start_new_session=True,  # Ctrl-C in the terminal is the supervisor's
        )
        self._on_line = on_line
        self._beats = beats
        assert self._process.stdin is not None
        self._orders = Lines(None, self._process.stdin.fileno())
        self._orders.send(start)
        self.tell(KEY, key=key.hex())
        self._reader = threading.Thread(target=self._read, name=f"dure-{self._process.pid}", daemon=True)
        self._reader.start()

    def lost_because(self) -> str:
        """Nothing: only the cable between the supervisor and the host may be out, and its agent notices that too."""
        return ""

    def exit_code(self) -> int | None:
        """None while it runs; LOST, which is ssh's own, when ssh lost the host."""
        return self._process.poll()

    def tell(self, name: str, **fields: str | int) -> None:
        """Send a message to its standard input; an agent that is gone is no error."""
        self._orders.send(encode(name, fields))

    def let_go(self) -> None:
        """Close its standard input, which asks it to end."""
        assert self._process.stdin is not None
        self._orders.close()
        self._process.stdin.close()

    def kill(self) -> None:
        """End our side at once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)

    def wait(self, deadline: float, check: Callable[[], None] = lambda: None) -> int | None:
        """Its exit code; None if it has not ended by then (`time.monotonic`)."""
        while self.exit_code() is None and time.monotonic() < deadline:
            check()
            time.sleep(0.05)
        if self.exit_code() is not None:
            self._reader.join(2.0)
        return self.exit_code()

    def _read(self) -> None:
        selector = selectors.DefaultSelector()
        process = self._process
        assert process.stdout is not None
        assert process.stderr is not None
        for stream in (process.stdout, process.stderr):
            selector.register(stream, selectors.EVENT_READ, Splitter())
        beat_at = 0.0
        while selector.get_map():
            if self._beats and time.monotonic() - beat_at >= BEAT_SECONDS:
                beat_at = time.monotonic()
                self.tell(ALIVE)
            for key, _ in selector.select(BEAT_SECONDS / 4):
                chunk = os.read(key.fd, 1 << 16)
                lines = key.data.take(chunk)
                if not chunk:
                    selector.unregister(key.fileobj)
                if key.data.rest and (not chunk or len(key.data.rest) > LONGEST):
                    lines.append(bytes(key.data.rest))
                    key.data.rest.clear()
                for line in lines:
                    self._on_line(line.decode(errors="replace"), key.fd == process.stdout.fileno())
        selector.close()
        process.stdout.close()
        process.stderr.close()
