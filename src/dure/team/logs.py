"""The loggers of a team: rank 0 writes, the others know only that there are some."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from dure.base.errors import UsageError
from dure.comm.group import Group
from dure.comm.raise_on_all import raise_on_all
from dure.observe.loggers import LogWriter, Row, Run, open_writer
from dure.observe.loggers.writer import CLOSE_SECONDS, numbers_in

AFTER_A_FAILURE_SECONDS = 10.0


class TeamLogs:
    """Where `team.log` goes."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._is_open = False
        self._writer: LogWriter | None = None

    def open(self, names: Sequence[str], run: Run, history: Callable[[], Iterable[Row]] = tuple) -> None:
        """Open them on rank 0; what is wrong there is raised on all. A collective call."""
        if self._is_open:
            raise UsageError("team.log_to was called already; name all loggers at once")

        def opened() -> str:
            if self._group.rank == 0:
                self._writer = open_writer(names, run, history=history)
            return ""

        raise_on_all(self._group, "opening loggers", opened)
        self._is_open = True

    def log(self, values: Mapping[str, object], step: int) -> None:
        """Costs rank 0 some microseconds, the others nothing."""
        if not self._is_open:
            raise UsageError(
                "team.log has nowhere to log to; call team.log_to first, such as team.log_to('csv', …)"
            )
        if self._writer is None:
            return
        try:
            self._writer.log(step, numbers_in(values))
        except ValueError as error:
            raise UsageError(f"team.log: {error}; give numbers") from None

    def close(self, *, after_a_failure: bool = False) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close(AFTER_A_FAILURE_SECONDS if after_a_failure else CLOSE_SECONDS)
