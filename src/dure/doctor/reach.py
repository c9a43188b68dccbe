"""A line to a node: the doctor's part is started there, by whatever command reaches it, and asked."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

from dure.base.errors import DureError
from dure.doctor.node import GOES_IN, READY

_END_SECONDS = 5.0
_LAST_WORDS = 400
_AFTERMATH = re.compile(r"srun: error: \S+: tasks? .*: (Exited with exit code|Terminated|Killed)")
"""What srun says after the task itself has said why."""


@dataclass(frozen=True)
class Node:
    """A node, and how it is reached."""

    name: str
    command: tuple[str, ...]
    """Started here, becomes the doctor's part there."""
    attempt: str
    """What a person would try, to see whether it can be reached at all."""
    order: str | None = None
    """The first line that the part is sent: which image to go into."""
    environment: Mapping[str, str] | None = None
    """The command's, if not ours."""


class Unreached(DureError):
    """A node did not answer; says what it said instead."""


class Failed(Unreached):
    """A node answered that it could not do what it was asked to."""


class NodeChannel:
    """A conversation with one node."""

    def __init__(self, node: Node) -> None:
        """Start the node's part."""
        self.node = node
        self.goes_in = False
        """Whether it was last heard of on its way into the image."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the line)
        self._process = subprocess.Popen(
            node.command,
            env=node.environment,
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
        if node.order is not None:
            with contextlib.suppress(OSError):  # it has ended; waiting for it says so
                self._say(node.order)

    def wait_until_ready(self, reach_seconds: float, enter_seconds: float) -> None:
        """Wait for the node's first line, which may take longer once it goes into an image; skip what a login shell
        prints."""
        seconds = reach_seconds
        deadline = time.monotonic() + seconds
        while (said := self._next(deadline, seconds)) != READY:
            if said == GOES_IN:
                self.goes_in, seconds = True, enter_seconds
                deadline = time.monotonic() + seconds
        self.goes_in = False

    def ask(self, question: str, deadline_seconds: float, **values: Any) -> Any:
        """The answer to a question; raises Unreached when there is none in time."""
        try:
            self._say(json.dumps({"ask": question, **values}))
        except OSError:
            raise Unreached(self._why("hung up")) from None
        said = self._next(time.monotonic() + deadline_seconds, deadline_seconds)
        try:
            reply = json.loads(said)
        except ValueError:
            raise Unreached(f"says {said[:_LAST_WORDS]!r}, which is no answer") from None
        if "error" in reply:
            raise Failed(str(reply["error"]))
        return reply["answer"]

    def hang_up(self) -> None:
        """Say no more: the node's part takes its marks away, and ends."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]

    def close(self) -> None:
        """End the conversation."""
        self.hang_up()
        for end in (None, self._process.terminate, self._process.kill):
            # srun that is asked to end ends what it started; killed at once, it would leave it.
            if end is not None:
                end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
                break
        self._errors.close()

    def _say(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{text}\n")
        self._process.stdin.flush()

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
        """What happened, with the last words of ssh, of srun or of Python."""
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - _LAST_WORDS))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        telling = [line for line in lines if not _AFTERMATH.match(line)] or lines
        return f"{what}: {telling[-1]}" if telling else what
