"""When the communication thread waits for other ranks: the difference between arriving and all having arrived.

Only differences of this rank's own clock: who comes last waits least, whatever the clocks of other nodes say.
"""

from __future__ import annotations

import time
from types import TracebackType


class Waits:
    """The waits of one step. `with waits:` around each; written by the communication thread."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []
        self._began = 0.0

    def begin(self) -> None:
        """Forget the last step's; while the communication thread has nothing to do."""
        self._spans.clear()

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._spans.append((self._began, time.perf_counter()))

    def seconds_after(self, at: float) -> float:
        """The part of them that came after `at` (`time.perf_counter`): before, the rank still computed."""
        return sum(max(0.0, ended - max(began, at)) for began, ended in self._spans)
