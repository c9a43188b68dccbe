"""The command line, run for real."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def summary(self):
        """The object that `--json` printed."""
        assert self.code == 0, self.err
        return json.loads(self.out.splitlines()[-1])


def dure(*arguments, cwd=None, deadline_seconds=500, **env):
    """Run the command line in a process of its own."""
    ran = subprocess.run(
        [sys.executable, "-m", "dure", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8", **env},
        capture_output=True,
        text=True,
        timeout=deadline_seconds,
        check=False,
    )
    return Ended(ran.returncode, ran.stdout, ran.stderr)


def train(job, folder, *arguments, **options):
    """`dure train` with a run folder of the test's own; returns how it ended."""
    return dure("train", job, "--run-dir", folder, "--json", *arguments, **options)
