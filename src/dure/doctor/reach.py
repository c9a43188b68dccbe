"""A channel to a node: the doctor's part is started there, by whatever command reaches it, and asked."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dure.base.errors import DureError
from dure.base.lines import ENDED, LineError, Lines, decode, encode, split
from dure.doctor.node import ANSWER, ASK, ENTERING, READY

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
    order: bytes | None = None
    """The first message to the part: which image to go into."""
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
        self.entering_image = False
        """Whether it was last heard of on its way into the image."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the channel)
        self._process = subprocess.Popen(
            node.command,
            env=node.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # Ctrl-C is for the doctor, which ends them all
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._questions = Lines(None, self._process.stdin.fileno())
        self._answers = Lines(self._process.stdout.fileno(), None)
        if node.order is not None:
            self._questions.send(node.order)

    def wait_until_ready(self, reach_seconds: float, enter_seconds: float) -> None:
        """Wait for the node's first message, which may take longer once it goes into an image; skip what a login shell
        prints."""
        deadline = time.monotonic() + reach_seconds
        while (said := split(self._next(deadline, reach_seconds))[0].decode(errors="replace")) != READY:
            if said == ENTERING:
                self.entering_image, reach_seconds = True, enter_seconds
                deadline = time.monotonic() + enter_seconds
        self.entering_image = False

    def ask(self, question: str, deadline_seconds: float, **values: Any) -> Any:
        """The answer to a question; raises Unreached when there is none in time."""
        self._questions.send(encode(ASK, {"ask": question, **values}))
        said = self._next(time.monotonic() + deadline_seconds, deadline_seconds)
        try:
            name, reply = decode(said)
        except LineError:
            name, reply = "", {}
        if name != ANSWER:
            text = said[:_LAST_WORDS].decode(errors="replace")
            raise Unreached(f"says {text!r}, which is no answer") from None
        if "error" in reply:
            raise Failed(str(reply["error"]))
        return reply["answer"]

    def hang_up(self) -> None:
        """Say no more: the node's part takes its marks away, and ends."""
        self._questions.close()
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
        self._answers.close()
        self._process.stdout.close()  # type: ignore[union-attr]
        self._errors.close()

    def _next(self, deadline: float, seconds: float) -> bytes:
        """The next line; `seconds` is what the deadline was, for the message."""
        self._questions.flush(max(0.1, deadline - time.monotonic()))
        try:
            return self._answers.next(deadline - time.monotonic())
        except LineError as error:
            late = f"no answer within {seconds:.0f} s"
            why = "hung up" if self._answers.closed == ENDED else str(error) if self._answers.closed else late
            raise Unreached(self._why(why)) from None

    def _why(self, what: str) -> str:
        """What happened, with the last words of ssh, of srun or of Python."""
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - _LAST_WORDS))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        telling = [line for line in lines if not _AFTERMATH.match(line)] or lines
        return f"{what}: {telling[-1]}" if telling else what
