"""`dure run` in a process of its own, disturbed from outside."""

import json
import os
import subprocess
import sys
import time

from dure.base.run_folder import RunFolder
from dure.observe.heartbeat import Phase, read_beat
from support import FOLDER

SAVING = FOLDER / "saving.py"
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}


class ScriptRun:
    """A script under `dure run`; started again in the same folder, it goes on."""

    def __init__(self, path, script=SAVING):
        self.folder = RunFolder(path)
        self.out = path.with_name(f"{path.name}.json")
        self.script = script
        self.process = None

    def start(self, ranks, *arguments, own=()):
        command = ["run", "--ranks", ranks, "--run-dir", self.folder.path, *own, self.script, self.out]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dure", *map(str, command), *map(str, arguments)],
            env={**os.environ, **_ENVIRONMENT},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for_step(self, ranks, step, but=(), deadline_seconds=300):
        """The processes of all ranks, once all are in `step` or beyond, and none of them is one of `but`."""
        deadline = time.monotonic() + deadline_seconds
        while True:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            beats = [read_beat(self.folder.heartbeat(rank)) for rank in range(ranks)]
            if all(beat and beat.step >= step and beat.pid not in but for beat in beats):
                assert all(beat.phase is not Phase.DONE for beat in beats), "too late"
                return [beat.pid for beat in beats]
            time.sleep(0.002)

    def end(self):
        """(exit code, what it said, what it came to)."""
        said, trouble = self.process.communicate(timeout=300)
        found = json.loads(self.out.read_text()) if self.out.exists() else None
        return self.process.returncode, said + trouble, found

    def clear(self):
        if self.process is not None:
            self.process.kill()
            self.process.communicate()

    def restarts(self):
        """The steps and ranks of this launch's restarts."""
        if not self.folder.restarts.exists():
            return []
        return [json.loads(line) for line in self.folder.restarts.read_text().splitlines()]


def alone(out, *arguments):
    """The script as one plain process; (exit code, what it said, what it came to)."""
    ended = subprocess.run(
        [sys.executable, str(SAVING), str(out), *map(str, arguments)],
        env={**os.environ, **_ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    found = json.loads(out.read_text()) if out.exists() else None
    return ended.returncode, ended.stdout + ended.stderr, found
