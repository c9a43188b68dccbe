"""What the tests of several nodes share: a job on a lab's storage, its commands, and waiting for what happens."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

from dure.observe.events import Stepped, read_events
from support.leftovers import wait_until

HERE = Path(__file__).parent
JOB = """
name = "steady"
storage = "."

[model]
factory = "steady.py:model"

[data]
factory = "steady.py:samples"
args = {{ pace = "{{storage}}/pace" }}
global_batch = 16

[train]
optimizer = "SGD"
lr = 0.05
optimizer_args = {{ momentum = 0.9 }}
steps = {steps}
seed = 3

[team]
ranks = 2
shards = 8

[checkpoint]
every_seconds = 2
memory_every = 5
"""


def put_job(storage, steps, pace=0.0):
    """Write the job to the shared storage; returns its path there."""
    shutil.copy(HERE / "steady.py", storage)
    (storage / "steady.toml").write_text(JOB.format(steps=steps))
    set_pace(storage, pace)
    return storage / "steady.toml"


def set_pace(storage, seconds):
    """Seconds that a rank takes for each sample, from now on. Whole or not at all: ranks read it all the time."""
    new = storage / "pace.new"
    new.write_text(str(seconds))
    new.rename(storage / "pace")


class Started:
    """A command that runs in a place of the lab; its output goes to files."""

    def __init__(self, lab, place, arguments, folder):
        self.out, self.err = (
            folder / f"{place}-{time.monotonic_ns()}.out",
            folder / f"{place}-{time.monotonic_ns()}.err",
        )
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                lab.command(place, [sys.executable, "-m", "dure", *map(str, arguments)]),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"},
            )

    @property
    def said(self):
        return self.err.read_text(errors="replace")

    def summary(self, deadline_seconds=400):
        """What it printed on standard output, when it has ended well."""
        assert self.process.wait(deadline_seconds) == 0, self.said
        return json.loads(self.out.read_text())

    def says(self, words, deadline_seconds=240, after=0):
        """Wait until it has said these words (behind the first `after` characters); returns when, and how much."""
        deadline = time.monotonic() + deadline_seconds
        while True:
            text = self.said
            at = text.find(words, after)
            if at >= 0:
                return time.monotonic(), at + len(words)
            assert self.process.poll() is None or words in self.said, f"ended without {words!r}:\n{self.said}"
            assert time.monotonic() < deadline, f"no {words!r} within {deadline_seconds} s:\n{self.said}"
            time.sleep(0.05)

    def agent(self):
        """The process of `dure train` itself, which the lab's way into the place has started."""

        def find():
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "train" in process.cmdline():
                        return process
            return None

        return wait_until(find, "the agent's process")

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(60)


def furthest_step(run):
    """The last step that rank 0 of a run has recorded."""
    recorded = read_events(run / "events" / "rank-0.jsonl")
    return next((event.step for event in reversed([*recorded]) if isinstance(event, Stepped)), -1)


def wait_for_step(run, step, started, deadline_seconds=240):
    """Wait until the run has done a step."""
    deadline = time.monotonic() + deadline_seconds
    while furthest_step(run) < step:
        assert started.process.poll() is None, started.said
        assert time.monotonic() < deadline, f"step {step} was not reached:\n{started.said}"
        time.sleep(0.1)


def restarts(run):
    """How often the team of a run was started again after a failure, in its last launch."""
    path = run / "restarts.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0
