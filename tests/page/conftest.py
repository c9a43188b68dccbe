"""A browser, and a run that is watched while it trains and after."""

import contextlib
import json
import os
import subprocess
import sys
from importlib.resources import files
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
        wait_until(lambda: run.steps() > 4 or run.process.poll() is not None, "some steps", 250)
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


SERIOUS = ("serious", "critical")


class Opened:
    """A page that notes what a page must not do: errors, and requests to anywhere else."""

    def __init__(self, browser, address, **options):
        self.context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        self.page = self.context.new_page()
        self.errors, self.elsewhere = [], []
        self.address = address
        self.page.on("console", lambda told: self.errors.append(told.text) if told.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", self._note)

    def _note(self, request):
        if not request.url.startswith((self.address.split("#")[0], "data:", "about:", "blob:")):
            self.elsewhere.append(request.url)

    def show(self, view, address=None):
        self.page.goto("about:blank")
        self.page.goto(f"{address or self.address}#{view}")
        self.page.wait_for_selector("main[data-drawn-ms] .card")
        return self.page.inner_text("main")

    def has_overflow(self):
        return self.page.evaluate(
            "document.documentElement.scrollWidth > document.documentElement.clientWidth + 1"
        )

    def findings(self):
        """What axe-core finds that keeps people out."""
        script = files("axe_playwright_python") / "axe.min.js"
        # Through the debugger: the page's own policy lets in no script from outside.
        self.page.evaluate(script.read_text())
        found = self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [
            (one["id"], one["help"], [node["html"][:200] for node in one["nodes"][:3]])
            for one in found["violations"]
            if one["impact"] in SERIOUS
        ]

    def close(self):
        self.context.close()


@pytest.fixture
def opened(browser):
    pages = []

    def open_page(address, **options):
        pages.append(Opened(browser, address, **options))
        return pages[-1]

    yield open_page
    for one in pages:
        assert one.errors == []
        assert one.elsewhere == []
        one.close()
