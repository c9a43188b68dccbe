"""One run of a job that is disturbed from outside, and what its files say of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dure.base.errors import DureError
from dure.base.run_folder import RunFolder
from dure.launch import process_tree
from dure.observe.events import Reading, Recorded
from dure.observe.heartbeat import Beat, Phase, read_beat

_LOOK_SECONDS = 0.002
_RUN_SECONDS = 3600.0


@dataclass
class Attempt:
    """`dure train` in a process of its own; started again in the same folder, it goes on."""

    job: Path
    folder: RunFolder
    ranks: int
    arguments: Sequence[str]
    starts: int = 0
    _process: subprocess.Popen[str] | None = field(default=None, repr=False)

    def start(self) -> None:
        """Start the command."""
        command = [sys.executable, "-m", "dure", "train", str(self.job), "--json", *self.arguments]
        command += ["--ranks", str(self.ranks), "--run-dir", str(self.folder.path)]
        self.starts += 1
        with self._errors.open("a") as errors:
            self._process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                # A drill that is killed leaves no run behind. It has no threads that a fork could catch off guard.
                preexec_fn=partial(process_tree.die_with, os.getpid()),  # noqa: PLW1509
            )

    @property
    def launcher(self) -> int:
        """The launcher's pid."""
        return self._running.pid

    def wait_for_step(self, step: int) -> list[Beat]:
        """Return every rank's beat as soon as all are in `step` or beyond."""
        deadline = time.monotonic() + _RUN_SECONDS
        while time.monotonic() < deadline:
            beats = [read_beat(self.folder.heartbeat(rank)) for rank in range(self.ranks)]
            here = [beat for beat in beats if beat is not None and beat.step >= step]
            if len(here) == self.ranks:
                return here
            if self._running.poll() is not None or any(beat and beat.phase is Phase.DONE for beat in beats):
                raise DureError(f"the run ended before step {step}: {self._last_words()}")
            time.sleep(_LOOK_SECONDS)
        raise DureError(f"the run did not come to step {step} within {_RUN_SECONDS:.0f} s")

    def wait_until_gone(self) -> float:
        """Wait for the launcher, which was killed; returns when that was known (CLOCK_MONOTONIC)."""
        self._running.wait(60)
        assert self._running.stdout is not None
        self._running.stdout.close()
        return time.monotonic()

    def summary(self) -> dict[str, Any]:
        """Wait for the end, and return what the run came to."""
        try:
            out, _ = self._running.communicate(timeout=_RUN_SECONDS)
        except subprocess.TimeoutExpired:
            self.end()
            raise DureError(f"{self.folder.path} did not end within {_RUN_SECONDS:.0f} s") from None
        if self._running.returncode != 0:
            raise DureError(f"the run ended with {self._running.returncode}: {self._last_words()}")
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        return found

    def end(self) -> None:
        """Leave nothing running."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.communicate()

    def events(self) -> list[Recorded]:
        """What rank 0 recorded, with its times: comparable with ours, it ran on this host."""
        return list(Reading(self.folder.events(0)).records())

    def noticed_at(self, since: float) -> float | None:
        """When the launcher noticed a failure after `since` (CLOCK_MONOTONIC)."""
        try:
            lines = self.folder.restarts.read_text(encoding="utf-8").splitlines()
        except OSError:
            return None
        times = [json.loads(line)["at_ns"] / 1e9 for line in lines]
        return next((at for at in times if at >= since), None)

    @property
    def _running(self) -> subprocess.Popen[str]:
        assert self._process is not None, "start comes first"
        return self._process

    @property
    def _errors(self) -> Path:
        self.folder.path.mkdir(parents=True, exist_ok=True)
        return self.folder.path / "drill-stderr.txt"

    def _last_words(self) -> str:
        lines = self._errors.read_text(errors="replace").splitlines()
        return lines[-1] if lines else "it said nothing"
