"""Runs one experiment at a time in a thread, and tells what came of it so far."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dure.base.errors import DureError, UsageError
from dure.base.run_folder import RunFolder
from dure.base.say import printable, redacted
from dure.observe.events import TeamFormed
from dure.page.columns import Steps, read_line
from dure.tools.lesson.experiments import Command, checked

MOST_LINES = 5_000
MOST_BYTES = 4 << 20
"""Of one file of rows or events that is sent to the browser."""
MOST_POINTS = 400
"""Of one run's steps over time."""
LONGEST_SECONDS = 300.0
"""An experiment that takes longer is ended."""
JOIN_SECONDS = 60.0
"""A rank that is to be killed may take so long to join its team; what it records appears a little after it did."""
END_SECONDS = 40.0
"""A command that is told to end may take so long; then it is killed."""


class Running:
    """One experiment: its lines as they come, its rows, its results."""

    def __init__(self, number: int, name: str, arguments: dict[str, Any]) -> None:
        self.number, self.name, self.arguments = number, name, arguments
        self._experiment, self._arguments = checked(name, arguments)
        self._lock = threading.Lock()
        self._lines: list[dict[str, Any]] = []
        self._state, self._trouble = "running", ""
        self._results: dict[str, Any] = {}
        self._done: list[Command] = []
        self._process: subprocess.Popen[str] | None = None
        self._current: Command | None = None
        self._stopping = False
        self.folder = Path(tempfile.mkdtemp(prefix="dure-lesson-"))
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"lesson {name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            failed = False
            commands = self._experiment.commands(self.folder, **self._arguments)
            for command in commands:
                if (failed or self._stopping) and not command.always:
                    continue
                failed = not self._command(command) or failed
            self._end("stopped" if self._stopping else "failed" if failed else "done")
        except (DureError, OSError) as error:
            self._end("failed", str(error))

    def _end(self, state: str, trouble: str = "") -> None:
        with self._lock:
            self._state = state
            self._trouble = self._trouble or redacted(printable(trouble))

    def _command(self, command: Command) -> bool:
        """Run one command to its end; False if it failed."""
        with self._lock:
            if self._stopping and not command.always:
                return False
            process = subprocess.Popen(
                command.argv,
                cwd=command.cwd or self.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env={**os.environ, "PYTHONUNBUFFERED": "1", "LC_ALL": "C.UTF-8"},
                start_new_session=True,  # ended as a whole, and not by the terminal's Ctrl-C
            )
            self._process, self._current = process, command
        watchdog = threading.Timer(LONGEST_SECONDS, self.stop)
        watchdog.daemon = True
        watchdog.start()
        told = threading.Thread(target=self._hear, args=(process.stderr, command.label), daemon=True)
        told.start()
        out = process.stdout.read(MOST_BYTES) if process.stdout is not None else ""
        code = process.wait()
        told.join(END_SECONDS)
        for stream in (process.stdout, process.stderr):
            if stream is not None and not told.is_alive():
                stream.close()
        watchdog.cancel()
        with self._lock:
            self._process, self._current = None, None
            self._done.append(command)
            if code == 0 and command.json:
                self._results[command.label] = json.loads(out)
            elif code and not command.always:
                self._trouble = next(
                    (line["text"] for line in reversed(self._lines)), f"it ended with {code}"
                )
        return code == 0

    def _hear(self, stream: Any, label: str) -> None:
        for line in stream:
            with self._lock:
                if len(self._lines) < MOST_LINES:
                    at = round(time.monotonic() - self._began, 3)
                    self._lines.append({"at": at, "of": label, "text": redacted(printable(line.strip()))})

    def told(self, since: int) -> dict[str, Any]:
        """What there is to draw: lines from `since` on, all rows and results."""
        with self._lock:
            commands = [*self._done, *([self._current] if self._current is not None else [])]
            told = {
                "id": self.number,
                "name": self.name,
                "arguments": self.arguments,
                "state": self._state,
                "trouble": self._trouble,
                "command": self._current.label if self._current is not None else None,
                "seconds": round(time.monotonic() - self._began, 3),
                "commands": {each.label: _shown(each.argv) for each in commands},
                "lines": self._lines[since:],
                "next": len(self._lines),
                "results": dict(self._results),
            }
        told["rows"] = {each.label: [*_rows(each.rows)] for each in commands if each.rows is not None}
        told["restarts"] = {
            each.label: [*_json_lines(RunFolder(each.run).restarts)]
            for each in commands
            if each.run is not None
        }
        told["progress"] = {
            each.label: _progress(RunFolder(each.run).events(0), self._began)
            for each in commands
            if each.run is not None
        }
        return told

    def kill(self, rank: int) -> int:
        """Kill one rank of the run that trains now, as `kill -9` does; returns its process id. Where it has not joined
        its team yet, as at the start or after another was killed, as soon as it has."""
        with self._lock:
            wanted = self._current
        if wanted is None or wanted.run is None:
            raise UsageError("nothing trains at the moment")
        deadline = time.monotonic() + JOIN_SECONDS
        while True:
            formed = [
                row for row in _json_lines(RunFolder(wanted.run).events(rank)) if row.get("kind") == "team"
            ]
            with self._lock:
                trains = self._current is wanted and not self._stopping
            if not trains:
                raise UsageError(f"rank {rank} has ended already")
            if formed and self._ours(int(formed[-1]["pid"])):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(formed[-1]["pid"]), signal.SIGKILL)
                    return int(formed[-1]["pid"])
            if time.monotonic() > deadline:
                raise UsageError(f"rank {rank} has not joined its team within {JOIN_SECONDS:.0f} s")
            time.sleep(0.05)

    def _ours(self, pid: int) -> bool:
        """Whether a process descends from the command that runs now: another may have the number by now."""
        with self._lock:
            top = self._process.pid if self._process is not None else -1
        while pid > 1:
            if pid == top:
                return True
            try:
                stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                return False
            pid = int(stat.rpartition(")")[2].split()[1])
        return False

    def stop(self) -> None:
        """End the experiment: the command's ranks too, as Ctrl-C would."""
        with self._lock:
            self._stopping, process = True, self._process
        if process is None:
            return
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS / 4)
                return

    def close(self) -> None:
        """End it if it still runs, and remove its files."""
        self.stop()
        self._thread.join(END_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)


class Lab:
    """The experiments of one reader's server: one at a time; the last one's files stay until the next begins."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._last: Running | None = None

    def start(self, name: object, arguments: object) -> int:
        """Start an experiment; returns its number."""
        checked(name, arguments)
        with self._lock:
            if self._last is not None and self._last.told(0)["state"] == "running":
                raise UsageError("another experiment is still running; wait for its end, or stop it")
            if self._last is not None:
                self._last.close()
            self._count += 1
            assert isinstance(name, str)
            assert isinstance(arguments, dict)
            self._last = Running(self._count, name, arguments)
            return self._count

    def find(self, number: int) -> Running:
        """The experiment of that number."""
        with self._lock:
            if self._last is None or self._last.number != number:
                raise UsageError(f"experiment {number} is gone; start it again")
            return self._last

    def close(self) -> None:
        """End what runs, remove what is left."""
        with self._lock:
            if self._last is not None:
                self._last.close()
                self._last = None


def _shown(argv: tuple[str, ...]) -> str:
    """The command as a reader would type it."""
    words = ["python" if word == sys.executable else word for word in argv[2:]]
    return " ".join(
        word if word.replace("-", "").replace("/", "").isalnum() else f"'{word}'" for word in words
    )


def _rows(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("rank-*.jsonl")):
        yield from _json_lines(path)


def _progress(events: Path, began: float) -> list[tuple[float, int, int]]:
    """(seconds since the experiment began, steps done, session) of a rank, by its clock, which is this machine's; for
    each line of steps, its first and its last. A session begins each time that the team was formed."""
    found: list[tuple[float, int, int]] = []
    session = 0
    with contextlib.suppress(OSError), events.open("rb") as file:
        for line in file.read(MOST_BYTES).split(b"\n")[:-1]:
            with contextlib.suppress(ValueError):
                told = read_line(line + b"\n")
                if isinstance(told, Steps):
                    found.append((round(told.began_at - began, 3), told.first + 1, session))
                    found.append((round(told.ended_at - began, 3), told.first + len(told), session))
                else:
                    session += any(isinstance(one.event, TeamFormed) for one in told)
    return found[:: 1 + len(found) // MOST_POINTS]


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file that may still grow."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES)
    except OSError:
        return
    for line in text.split(b"\n")[:-1]:
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                yield row
