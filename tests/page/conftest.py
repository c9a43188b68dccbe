"""A browser, and a run that is watched while it trains and after."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.leftovers import wait_until
from support.straggling import JOB

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextlib.contextmanager
def serving(*arguments, **env):
    """`dure page` with these arguments; what it printed as JSON."""
    command = [sys.executable, "-m", "dure", "page", *map(str, arguments), "--json", "--no-open", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **env}) as server:
        try:
            yield json.loads(server.stdout.readline())
        finally:
            server.terminate()
            ended = server.wait(30)
    assert ended == 0


@pytest.fixture(scope="session")
def browser():
    """Debian's Chromium."""
    if not CHROMIUM.exists():
        pytest.skip(f"no browser: {CHROMIUM} is not there (apt-get install chromium fonts-noto-cjk)")
    api = pytest.importorskip("playwright.sync_api", reason="no playwright to drive a browser with")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield found
        found.close()


class Watched:
    """A run of three ranks, of which rank 1 is 200 ms late in backward until it is told to hurry."""

    def __init__(self, folder):
        self.folder, self.run = folder, folder / "runs" / "late"
        self.pace = folder / "pace"
        self.pace.write_text("0.2")
        job = folder / "late.toml"
        job.write_text(JOB.format(pace=self.pace))
        command = [sys.executable, "-m", "dure", "train", str(job), "--run-dir", str(self.run), "--json"]
        tests = str(Path(__file__).parents[1])
        self.process = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": tests}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def steps(self):
        """How many steps its first rank has written, as far as lines tell."""
        path = self.run / "events" / "rank-0.jsonl"
        return path.read_text().count('"kind":"steps"') if path.exists() else 0

    def finish(self):
        """Let it hurry, and wait for its end."""
        self.pace.write_text("0")
        out, err = self.process.communicate(timeout=300)
        assert self.process.returncode == 0, err.decode()
        return json.loads(out)


@pytest.fixture(scope="session")
def watched(tmp_path_factory):
    run = Watched(tmp_path_factory.mktemp("watched"))
    try:
        wait_until(lambda: run.steps() > 8 or run.process.poll() is not None, "some steps")
        assert run.process.poll() is None, run.process.stderr.read().decode()
        yield run
    finally:
        if run.process.poll() is None:
            run.process.terminate()
            run.process.communicate(timeout=60)


@pytest.fixture(scope="session")
def address(watched):
    """Where its page is, while it runs and after."""
    with serving(watched.run) as told:
        yield told["url"]


@pytest.fixture(scope="session")
def finished(watched):
    """The same run when it is done: its summary."""
    return watched.finish()
