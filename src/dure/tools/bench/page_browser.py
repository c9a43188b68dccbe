"""A page that is served, and a browser to open it in, for the benches that measure them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = (
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextlib.contextmanager
def served(run: Path) -> Iterator[tuple[str, int]]:
    """`dure page` of a run: its address and process id."""
    command = [sys.executable, "-m", "dure", "page", str(run), "--json", "--no-open", "--port=0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield json.loads(server.stdout.readline())["url"], server.pid
    finally:
        server.terminate()
        server.wait(20)


@contextlib.contextmanager
def browser_page() -> Iterator[Any]:
    """A page of a headless browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        try:
            yield browser.new_page(viewport={"width": 1280, "height": 900})
        finally:
            browser.close()
