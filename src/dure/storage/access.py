"""How often storage was asked, for how many bytes, for how long."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Access:
    """What one store did since it was opened. Any thread may count, and read, at any time.

    A request is one question to the storage: a positional read, a look at a size or a list of names, a
    write of one part, a removal. A failed request counts too, as storage had to answer.
    """

    read_requests: int = 0
    read_bytes: int = 0
    write_requests: int = 0
    written_bytes: int = 0
    seconds: float = 0.0
    """Spent in the store, added over threads."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def read(self, num_bytes: int = 0, *, requests: int = 1) -> None:
        """Count requests that read, or that only look."""
        with self._lock:
            self.read_requests += requests
            self.read_bytes += num_bytes

    def wrote(self, num_bytes: int = 0, *, requests: int = 1) -> None:
        """Count requests that write or remove."""
        with self._lock:
            self.write_requests += requests
            self.written_bytes += num_bytes

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time spent inside to `seconds`."""
        began = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self.seconds += time.monotonic() - began

    def as_dict(self) -> dict[str, int | float]:
        """All counts of one moment, by name."""
        with self._lock:
            return {
                "read_requests": self.read_requests,
                "read_bytes": self.read_bytes,
                "write_requests": self.write_requests,
                "written_bytes": self.written_bytes,
                "seconds": self.seconds,
            }
