"""Lines in a file: CSV (step, name, value) or JSON."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from dure.base.files import open_own
from dure.observe.loggers.backend import Row
from dure.observe.loggers.identity import last_steps

_HEAD = b"step,name,value\r\n"


class LinesFile:
    """A file that grows by lines."""

    def __init__(self, path: Path) -> None:
        self._is_csv = path.suffix == ".csv"
        self._file = os.fdopen(open_own(path, os.O_RDWR | os.O_CREAT), "r+b")
        self._end = 0
        self._logged = last_steps(self._names_and_steps())
        self._file.truncate(self._end)  # half a line that a kill left
        self._file.seek(self._end)
        if self._is_csv and self._end == 0:
            self._file.write(_HEAD)
            self._file.flush()

    def logged(self) -> dict[str, int]:
        """As the file has it."""
        return self._logged

    def write(self, rows: Sequence[Row]) -> None:
        """All rows at once, out of this process."""
        start = self._file.tell()
        try:
            self._file.write(b"".join(map(self._encoded, rows)))
            self._file.flush()
        except OSError:
            os.ftruncate(self._file.fileno(), start)  # half a line would spoil the next one
            raise

    def close(self) -> None:
        """Whatever is written stays."""
        self._file.close()

    def _encoded(self, row: Row) -> bytes:
        if not self._is_csv:
            # JSON has no NaN and no infinity.
            values = {name: value if math.isfinite(value) else None for name, value in row.values.items()}
            return json.dumps({"step": row.step, "time": round(row.at, 3), **values}).encode() + b"\n"
        text = io.StringIO()
        csv.writer(text).writerows((row.step, name, repr(value)) for name, value in row.values.items())
        return text.getvalue().encode()

    def _names_and_steps(self) -> Iterator[tuple[str, int]]:
        for line in self._file:
            if not line.endswith(b"\n"):
                return
            self._end += len(line)
            if line == _HEAD:
                continue
            try:
                if self._is_csv:
                    step, name, _ = next(csv.reader([line.decode()]))
                    yield name, int(step)
                else:
                    values = json.loads(line)
                    yield from (
                        (name, int(values["step"])) for name in values if name not in ("step", "time")
                    )
            except (ValueError, KeyError, TypeError):  # somebody else's line
                continue
