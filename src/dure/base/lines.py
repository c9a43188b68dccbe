"""The one line protocol: agents, supervisor and agent over ssh, doctor and node, lab and place.

A message is a line: a name, a space, a JSON object. It travels over a socket or a pair of pipes. Lines have a greatest
length, waits have a deadline, and a peer that breaks either, or does not take what is sent to it, costs its own channel
and nothing else: `Lines.closed` says why. Nothing is ever unpickled. Imports nothing outside the standard library.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from dure.base.errors import DureError

LONGEST = 16 * 1024 * 1024
"""Bytes of a line, unless a channel says otherwise."""
ENDED = "the connection was closed"
_CHUNK = 1 << 16
_TURN_BYTES = 1 << 20
"""How much is taken from one channel before others have their turn."""
_LOOK_SECONDS = 0.25


class LineError(DureError):
    """The peer is gone, late, or has sent what no peer of this version sends."""


def encode(name: str, fields: Mapping[str, Any] | None = None) -> bytes:
    """A message as a line."""
    # A path or a log may hold half a surrogate pair, which is no text that another program would take.
    return f"{name} {json.dumps(fields or {}, ensure_ascii=False)}\n".encode(errors="replace")


def split(line: bytes) -> tuple[bytes, bytes]:
    """A message's name and its JSON, both unchecked."""
    name, _, fields = line.partition(b" ")
    return name, fields


def decode(line: bytes) -> tuple[str, dict[str, Any]]:
    """The inverse of `encode`; raises LineError."""
    name, text = split(line)
    try:
        fields = json.loads(text)
        if isinstance(fields, dict):
            return name.decode(), fields
    except (ValueError, RecursionError):
        pass
    raise LineError(f"not a message of this version of dure: {line[:80]!r}")


class Splitter:
    """Chunks of bytes in, whole lines out."""

    def __init__(self) -> None:
        self.rest = bytearray()
        """The start of a line whose end has not come yet."""

    def take(self, chunk: bytes) -> list[bytes]:
        """The lines that are whole now, without their ends."""
        self.rest += chunk
        if b"\n" not in chunk:
            return []
        *whole, self.rest = self.rest.split(b"\n")
        return [bytes(line) for line in whole]


class Lines:
    """Lines over two descriptors, which may be the same one; they stay the caller's.

    Only `next`, `wait` and `flush` wait, and no longer than they are told to. One thread may read while another sends.
    """

    def __init__(
        self,
        source: int | None,
        sink: int | None,
        *,
        longest: int = LONGEST,
        most_unsent: int = LONGEST,
        byte_by_byte: bool = False,
    ) -> None:
        """`source` is read from and `sink` written to; either may be None.

        `most_unsent`: bytes that the peer may leave untaken. `byte_by_byte`: what follows a line stays in `source`, for
        another process.
        """
        self.closed = ""
        """Why nothing comes and goes any more, if so."""
        self.heard_at = time.monotonic()
        self.longest = longest
        self._source = source
        self._sink = sink
        self._most_unsent = most_unsent
        self._chunk = 1 if byte_by_byte else _CHUNK
        self._splitter = Splitter()
        self._received: deque[bytes] = deque()
        self._outgoing = bytearray()
        self._reading, self._sending = threading.Lock(), threading.Lock()

    @property
    def has_more_to_send(self) -> bool:
        """Whether the peer is slow to take what was sent."""
        return bool(self._outgoing) and not self.closed

    def send(self, line: bytes) -> None:
        """Send a line, now or as soon as the peer takes it; `flush` sends what was left over. Never waits."""
        if self.closed:
            return
        with self._sending:
            self._outgoing += line
        self.flush()
        if len(self._outgoing) > self._most_unsent and not self.closed:
            self.closed = f"it has not taken {len(self._outgoing)} bytes that were sent to it"

    def flush(self, seconds: float = 0.0) -> None:
        """Send what was left over; a peer that has not taken it when the seconds have passed is given up."""
        deadline = time.monotonic() + seconds
        with self._sending:
            while self._outgoing and not self.closed:
                left = max(0.0, deadline - time.monotonic())
                if _ready(self._sink, select.POLLOUT, left):
                    if not self._write_once() and not seconds:
                        return
                elif seconds and time.monotonic() >= deadline:
                    self.closed = f"it has not taken {len(self._outgoing)} bytes within {seconds:.0f} s"
                elif not seconds:
                    return

    def receive(self) -> list[bytes]:
        """The whole lines that have come; `closed` says when none will follow. Never waits."""
        taken = 0
        while taken < _TURN_BYTES and (count := self._read_once(0.0)):
            taken += count
        lines = list(self._received)
        self._received.clear()
        return lines

    def next(self, seconds: float) -> bytes:
        """The next line; raises LineError when there is none in time, or will be none."""
        deadline = time.monotonic() + seconds
        while not self._received:
            if self.closed:
                raise LineError(self.closed)
            left = deadline - time.monotonic()
            if left <= 0:
                raise LineError(f"no answer within {seconds:.0f} s")
            self._read_once(min(left, _LOOK_SECONDS))
        return self._received.popleft()

    def wait(self, seconds: float) -> None:
        """Wait until something has come or the seconds have passed."""
        if self.closed:
            time.sleep(seconds)
        elif not self._received:
            self._read_once(seconds)

    def close(self) -> None:
        """Read and send no more; returns when no other thread uses the descriptors."""
        self.closed = self.closed or "closed here"
        with self._reading, self._sending:
            pass

    def _read_once(self, seconds: float) -> int:
        """Wait for bytes and take them; how many."""
        with self._reading:
            if self.closed or not _ready(self._source, select.POLLIN, seconds):
                return 0
            try:
                chunk = self._take(self._chunk)
            except (BlockingIOError, InterruptedError):
                return 0
            except OSError as error:
                self.closed = error.strerror or str(error)
                return 0
            if not chunk:
                self.closed = ENDED
                return 0
            self.heard_at = time.monotonic()
            for line in self._splitter.take(chunk):
                if len(line) > self.longest:
                    self.closed = f"a message of {len(line)} bytes"
                    return 0
                self._received.append(line)
            if len(self._splitter.rest) > self.longest:
                self.closed = "a message without an end"
            return len(chunk)

    def _write_once(self) -> bool:
        """Whether anything was taken."""
        assert self._sink is not None
        # A pipe that is ready takes so much at once without blocking. A socket of ours does not block anyway.
        most = select.PIPE_BUF if os.get_blocking(self._sink) else _CHUNK
        try:
            del self._outgoing[: self._put(self._outgoing[:most])]
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self.closed = error.strerror or str(error)
        return True

    def _take(self, most: int) -> bytes:
        """Bytes that have come; BlockingIOError for none yet, nothing for the end."""
        return os.read(self._source or 0, most)

    def _put(self, chunk: bytearray) -> int:
        """How many of these bytes were taken; BlockingIOError for none."""
        return os.write(self._sink or 0, chunk)


def _ready(descriptor: int | None, event: int, seconds: float) -> bool:
    """Whether a call would not block; an end or an error counts as well, so that the call tells it."""
    if descriptor is None:
        return False
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(seconds * 1e3))
