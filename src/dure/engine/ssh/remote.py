"""One command on one host, over ssh or right here: started, heard, told, ended."""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dure.base.lines import LONGEST, Lines, Splitter, encode
from dure.base.team_key import TeamKey
from dure.engine.ssh.attached import ALIVE, BEAT_SECONDS, KEY

SSH_FAILED = 255
"""ssh's own exit code: the host was not reached, or the connection was lost."""
_PASSED_ON = ("PYTHONPATH", "LANG", "LC_ALL", "NO_COLOR", "AWS_ENDPOINT_URL", "AWS_PROFILE", "AWS_REGION")
_SSH_OPTIONS = (
    "-o",
    "BatchMode=yes",
    "-o",
    "ConnectTimeout=5",
    # A host that is gone is noticed in seconds, and a cable that is out for two of them does no harm.
    "-o",
    "ServerAliveInterval=2",
    "-o",
    "ServerAliveCountMax=3",
)


@dataclass(frozen=True)
class Host:
    """A host, and how it is reached."""

    name: str
    ssh: str
    here: bool
    """Whether it is this machine: then no ssh is needed."""

    def command(self, argv: Sequence[str], folder: str, environ: Mapping[str, str]) -> list[str]:
        """The local command line that runs `argv` there, in `folder`."""
        if self.here:
            return list(argv)
        kept = [f"{name}={environ[name]}" for name in _PASSED_ON if name in environ]
        # ssh hands one string to the user's shell there: every word is quoted for it.
        there = f"cd {shlex.quote(folder)} && exec env {shlex.join([*kept, *argv])}"
        return [*shlex.split(self.ssh), *_SSH_OPTIONS, "--", self.name, there]


class Remote:
    """An agent that runs on a host, and hears that we are there. What it prints is passed on, with the host's name."""

    def __init__(
        self,
        host: Host,
        argv: Sequence[str],
        start: bytes,
        key: TeamKey,
        *,
        prefix: str,
        out: Callable[[str], None] | None = None,
    ) -> None:
        """`out` takes what it prints on standard output, without a prefix; else that is passed on too.

        `start` is the first message to it. The key goes over standard input, too: arguments and variables can be seen
        by others.
        """
        self.host = host
        self.started_at = time.monotonic()
        self._process = subprocess.Popen(
            host.command(argv, os.getcwd(), os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal is the supervisor's
        )
        self._prefix = prefix
        self._out = out
        assert self._process.stdin is not None
        self._orders = Lines(None, self._process.stdin.fileno())
        self._orders.send(start)
        self.tell(KEY, key=key.hex())
        self._reader = threading.Thread(target=self._read, name=f"dure-{host.name}", daemon=True)
        self._reader.start()

    def exit_code(self) -> int | None:
        """None while it runs; 255 when ssh lost the host."""
        return self._process.poll()

    def tell(self, name: str, **fields: str) -> None:
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
            if time.monotonic() - beat_at >= BEAT_SECONDS:
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
                    self._pass_on(line.decode(errors="replace"), is_output=key.fd == process.stdout.fileno())
        selector.close()
        process.stdout.close()
        process.stderr.close()

    def _pass_on(self, line: str, *, is_output: bool) -> None:
        if is_output and self._out is not None:
            self._out(line)
        else:
            print(f"{self._prefix}{line}", file=sys.stderr, flush=True)


def answers(hosts: Sequence[Host], seconds: float) -> dict[str, str]:
    """Why each host that cannot be reached cannot; all are asked at once."""
    asked = {
        host.name: subprocess.Popen(
            host.command(["true"], "/", {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in hosts
        if not host.here
    }
    deadline = time.monotonic() + seconds
    trouble: dict[str, str] = {}
    for name, process in asked.items():
        try:
            _, told = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            if process.returncode != 0:
                trouble[name] = (
                    told.strip().splitlines()[-1] if told.strip() else f"exit code {process.returncode}"
                )
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            trouble[name] = f"no answer within {seconds:.0f} s"
    return trouble
