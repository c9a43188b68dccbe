"""What dure tells its user: a line on standard error, never on standard output, which belongs to results.

Output is never a reason to stop: a full disk, a closed pipe or a terminal that is gone costs the words, not the run.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import re
import select
import sys
from collections.abc import Callable
from typing import IO, Any, TextIO, cast

from dure.base.language import as_spoken

_USER_IN_URL = re.compile(r"(?<=://)[^\s/?#'\"<>]*@")
_SECRET_IN_URL = re.compile(
    r"(?i)([?&](?:[a-z0-9_-]*(?:signature|credential|token|password|secret|key)[a-z0-9_-]*)=)[^&\s'\"<>]+"
)
_SECRET_VARIABLE = re.compile(r"(?i)secret|token|password|passwd")
_SHORTEST_SECRET = 8
_WAIT_SECONDS = 1.0
_AS_IT_IS = "dure.as-it-is"

_launcher: Callable[[str], None] | None = None


def say(text: str, *, urgent: bool = False) -> None:
    """Tell the user, in one write: lines of several processes would mix otherwise.

    `urgent`, in a rank: also through the launcher, as the rank's own log may be on the disk that is in trouble.
    """
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
            sys.stderr.write(f"dure: {redacted(as_spoken(text))}\n")
            sys.stderr.flush()
    if urgent and _launcher is not None:
        _launcher(redacted(text))


def say_through(launcher: Callable[[str], None]) -> None:
    """Hand what is urgent to the launcher too; called once, in a rank."""
    global _launcher  # noqa: PLW0603
    _launcher = launcher


def redacted(text: str) -> str:
    """The text without passwords: those in URLs, and the values of variables that are named as secrets."""
    text = _SECRET_IN_URL.sub(r"\1***", _USER_IN_URL.sub("***@", text))
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST_SECRET and value in text and _SECRET_VARIABLE.search(name):
            text = text.replace(value, "***")
    return text


def printable(text: str, most: int = 500) -> str:
    """Somebody else's words as one line without control characters, which a terminal would obey."""
    shown = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text[:most])
    return shown + ("…" if len(text) > most else "")


def keep_output_harmless() -> None:
    """From now on, nothing that this process prints can fail: what cannot be written is dropped.

    Standard streams that were closed lead nowhere; else the next file that is opened would take their place.
    """
    codecs.register_error(_AS_IT_IS, _as_it_is)
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    sys.stdout = _harmless(1, sys.stdout)
    sys.stderr = _harmless(2, sys.stderr)


def _as_it_is(error: UnicodeError) -> tuple[str | bytes, int]:
    """A path that is not UTF-8 must not be what ends a run: its bytes are printed as they are."""
    assert isinstance(error, UnicodeEncodeError)
    outgoing = error.object[error.start : error.end]
    try:
        return outgoing.encode(error.encoding, "surrogateescape"), error.end
    except UnicodeEncodeError:  # what stands for no byte, or what this encoding has no letter for
        return outgoing.encode("ascii", "backslashreplace"), error.end


def stdout_trouble() -> OSError | None:
    """Why some of what was printed is lost, if `keep_output_harmless` was called; told once."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    buffer = getattr(sys.stdout, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    if not isinstance(raw, _Harmless):
        return None
    trouble, raw.trouble = raw.trouble, None
    return trouble


class _Harmless(io.RawIOBase):
    """A descriptor to write to; what it refuses is dropped, and the first refusal kept."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.trouble: OSError | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        left = view
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError as error:  # somebody else made it so: it is shared with a shell, say
                if not select.select([], [self._descriptor], [], _WAIT_SECONDS)[1]:
                    self.trouble = self.trouble or error
                    break
            except OSError as error:
                self.trouble = self.trouble or error
                break
        return len(view)


def _harmless(descriptor: int, before: TextIO | None) -> TextIO:
    if before is not None:
        with contextlib.suppress(OSError, ValueError):
            before.flush()
    raw = _Harmless(descriptor)
    unbuffered = bool(getattr(before, "write_through", False))  # python -u
    return io.TextIOWrapper(
        cast(IO[bytes], raw) if unbuffered else io.BufferedWriter(raw),
        encoding=getattr(before, "encoding", None) or "utf-8",
        errors=_AS_IT_IS,
        line_buffering=descriptor == 2 or os.isatty(descriptor),
        write_through=unbuffered,
    )
