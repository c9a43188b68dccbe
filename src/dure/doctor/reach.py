"""A line to each node: the doctor's part is started there, here or over ssh, and asked."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import IO, Any

from dure.doctor.node import READY
from dure.errors import DureError
from dure.hosts.remote import Host

_END_SECONDS = 5.0
_LAST_WORDS = 400


class Unreached(DureError):
    """A node did not answer; says what it said instead."""


class Line:
    """A conversation with one node."""

    def __init__(self, node: str, command: Sequence[str]) -> None:
        """Start `command`, which must become the doctor's part on `node`."""
        self.node = node
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the line)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C is for the doctor, which ends them all
        )
        self._said: queue.Queue[str | None] = queue.Queue()
        assert self._process.stdout is not None
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def wait_until_ready(self, deadline_seconds: float) -> None:
        """Wait for the node's first line; skip what a login shell prints."""
        deadline = time.monotonic() + deadline_seconds
        while self._next(deadline, deadline_seconds) != READY:
            pass

    def ask(self, question: str, deadline_seconds: float, **values: Any) -> Any:
        """The answer to a question; raises Unreached when there is none in time."""
        try:
            self.say(json.dumps({"ask": question, **values}))
        except OSError:
            raise Unreached(self._why("hung up")) from None
        reply = json.loads(self._next(time.monotonic() + deadline_seconds, deadline_seconds))
        if "error" in reply:
            raise Unreached(str(reply["error"]))
        return reply["answer"]

    def say(self, text: str) -> None:
        """Send one line."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{text}\n")
        self._process.stdin.flush()

    def hang_up(self) -> None:
        """Say no more: the node's part takes its marks away, and ends."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]

    def close(self) -> None:
        """End the conversation."""
        self.hang_up()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_SECONDS)
        self._errors.close()

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._said.put(line.rstrip("\n"))
        self._said.put(None)

    def _next(self, deadline: float, seconds: float) -> str:
        try:
            line = self._said.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise Unreached(self._why(f"no answer within {seconds:.0f} s")) from None
        if line is None:
            self._said.put(None)
            raise Unreached(self._why("hung up"))
        return line

    def _why(self, what: str) -> str:
        """What happened, with the last words of ssh or of Python."""
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - _LAST_WORDS))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"{what}: {lines[-1]}" if lines else what


def line_to(host: Host | None, node: str, python: str | None, image_order: str | None = None) -> Line:
    """Start the doctor's part on a host (None: here), in an image if there is an order to go into one."""
    part = [(None if host is None else python) or sys.executable, "-m", "dure", "doctor"]
    part.append("--serve" if image_order is None else "--serve-inside")
    line = Line(node, part if host is None else _on_host(host, part))
    if image_order is not None:
        with contextlib.suppress(OSError):  # it has ended; waiting for it says so
            line.say(image_order)
    return line


def _on_host(host: Host, part: list[str]) -> list[str]:
    # The same code at the same path, where it is told by the environment: what differs there is for the checks.
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)} if paths else os.environ
    return host.command(part, "/", environment)
