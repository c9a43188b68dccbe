"""Off the step path: the training thread appends to a bounded queue, a thread of its own opens loggers and writes."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from dure.base.files import make_own_folder
from dure.base.say import say
from dure.observe.loggers.backend import Backend, Row, Run, open_backend, refuse_missing

CAPACITY = 10_000
"""Rows that wait; what comes then is dropped and counted. Training never waits."""
LOOK_SECONDS = 0.5
CLOSE_SECONDS = 60.0
_TRIES = 3
"""A logger that fails so often in a row is left alone."""


class LogWriter:
    """Writes one run to several loggers. What goes wrong is told once, and never stops training."""

    def __init__(
        self,
        names: Sequence[str],
        run: Run,
        tell: Callable[[str], None] = say,
        history: Callable[[], Iterable[Row]] = tuple,
    ) -> None:
        """`history` tells what earlier sessions had to log, in order; it is called in the writer's thread, once."""
        self._names = tuple(names)
        self._run = run
        self._tell = tell
        self._history = history
        self._earlier: list[Row] | None = None
        self._queue: deque[Row] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._backends: dict[str, Backend] = {}
        self._logged: dict[str, Mapping[str, int]] = {}
        """By logger: the last step of each metric that it had when this session began."""
        self._failures: dict[str, int] = {}
        self.lost = 0
        """Rows that could not be kept."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log a step's values; returns at once."""
        if not self._names or self._closing:
            return
        if len(self._queue) >= CAPACITY:
            self.lost += 1
            return
        self._queue.append(Row(step, dict(values), time.time()))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="loggers", daemon=True)
            self._thread.start()

    def close(self, deadline_seconds: float = CLOSE_SECONDS) -> None:
        """Write what is left and end all loggers' sessions, waiting at most so long."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(deadline_seconds)
            if self._thread.is_alive():
                self._tell(
                    f"the loggers ({', '.join(self._names)}) are not done after {deadline_seconds:.0f} s; what they "
                    "had not written is lost"
                )
        if self.lost:
            self._tell(f"{self.lost} rows were not logged: the loggers could not keep up")

    def _work(self) -> None:
        while True:
            self._wake.wait(LOOK_SECONDS)
            closing = self._closing
            rows = [self._queue.popleft() for _ in range(len(self._queue))]
            if rows:
                for name in self._names:
                    self._try(name, partial(self._write, name, rows))
            if closing and not self._queue:
                break
        for name, backend in self._backends.items():
            self._try(name, backend.close)

    def _write(self, name: str, rows: Sequence[Row]) -> None:
        if name not in self._backends:
            make_own_folder(self._run.folder)
            backend = open_backend(name, self._run)
            self._logged[name] = backend.logged()
            self._backends[name] = backend
            if self._earlier is None:
                self._earlier = list(self._history())
            rows = [*self._earlier, *rows]  # what was on its way when an earlier session was killed
        # Steps that a restarted team repeats have the same bits as before: once is enough.
        logged = self._logged[name]
        new = [
            Row(row.step, values, row.at)
            for row in rows
            if (values := {key: v for key, v in row.values.items() if row.step > logged.get(key, -1)})
        ]
        if new:
            self._backends[name].write(new)

    def _try(self, name: str, call: Callable[[], None]) -> None:
        failed = self._failures.get(name, 0)
        if failed >= _TRIES:
            return
        try:
            call()
            self._failures[name] = 0
        except Exception as error:  # other people's code, and other people's servers
            self._failures[name] = failed + 1
            last = failed + 1 == _TRIES
            words = str(error).splitlines()[0][:300] if str(error) else ""
            if failed == 0 or last:
                ending = "it is left alone from now on" if last else "training goes on"
                self._tell(f"the logger {name} failed: {type(error).__name__}: {words}; {ending}")


def numbers_in(values: Mapping[str, object]) -> dict[str, float]:
    """What loggers can draw: numbers, also as tensors with one element. ValueError for anything else."""
    found = {}
    for name, value in values.items():
        item = getattr(value, "item", None)
        plain = item() if callable(item) else value
        if isinstance(plain, bool) or not isinstance(plain, int | float):
            raise ValueError(f"{name} is a {type(value).__name__}")
        found[allowed(name)] = float(plain)
    return found


def allowed(name: str) -> str:
    """A metric's name with the letters that all loggers take."""
    return "".join(letter if letter.isalnum() or letter in "_-. /" else "_" for letter in name) or "_"


def finite_only(values: Mapping[str, float | None]) -> dict[str, float]:
    """Without what is not there or is no number."""
    return {
        allowed(name): value for name, value in values.items() if value is not None and math.isfinite(value)
    }


def open_writer(
    names: Sequence[str],
    run: Run,
    tell: Callable[[str], None] = say,
    history: Callable[[], Iterable[Row]] = tuple,
) -> LogWriter:
    """A writer to these loggers; UsageError when one of them is not there."""
    refuse_missing(names)
    return LogWriter(tuple(dict.fromkeys(names)), run, tell, history)
