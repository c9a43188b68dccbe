"""`dure report`: the page's views and a run's numbers in one HTML file, for file:// and without a network."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dure.base.errors import UsageError
from dure.base.files import write_whole
from dure.base.language import Language
from dure.page.bundle import bundle
from dure.page.catalog import is_run
from dure.page.columns import COLUMNS
from dure.page.files import static_files
from dure.page.pyramid import STATS
from dure.page.run import MOST_BINS, RunView

_MOST_NUMBERS = 1_500_000
"""In the steps of one run: more makes a file that is slow to send and to open; bins of steps are saved then."""
_PDF_SECONDS = 120.0
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def write_report(runs: Sequence[Path], out: Path, language: Language, *, pdf: bool) -> dict[str, int]:
    """Write the report, and a PDF beside it; returns the files with their sizes."""
    browser = _browser() if pdf else None
    for run in runs:
        if not is_run(run):
            raise UsageError(f"{run} holds no run; name the folder that `dure train` wrote")
    names = [run.absolute().name for run in runs]
    if len(set(names)) < len(names):
        raise UsageError("two of the runs have the same name; rename one of their folders")
    saved = {
        "lang": language,
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "runs": [_saved_run(run.absolute()) for run in runs],
    }
    made = {}
    try:
        write_whole(out, _html(saved))
        made[str(out)] = out.stat().st_size
        if browser is not None:
            printed = out.with_suffix(".pdf")
            _print(browser, out, printed)
            made[str(printed)] = printed.stat().st_size
    except OSError as error:
        raise UsageError(
            f"cannot write {out}: {error.strerror or error}; give another file: -o FILE"
        ) from None
    return made


def _saved_run(path: Path) -> dict[str, Any]:
    view = RunView(path)
    try:
        view.read_all()
        state = view.state()
        end = max(1, state["steps"][1])
        bins = end if end * len(view.ranks) * len(COLUMNS) <= _MOST_NUMBERS else _fitting(len(view.ranks))
        stats = ["mean"] if bins == end else list(STATS)
        head, values = view.window(0, end, bins, COLUMNS, None, stats, most=bins)
        photos = view.thumbnails()
        encoded = None if photos is None else base64.b64encode(photos).decode()
        return {
            "state": state,
            "head": head,
            "values": base64.b64encode(values.astype("<f4").tobytes()).decode(),
            "samples": view.samples(),
            "thumbnails": encoded and f"data:image/jpeg;base64,{encoded}",
        }
    finally:
        view.close()


def _fitting(ranks: int) -> int:
    return max(MOST_BINS // 8, _MOST_NUMBERS // max(1, ranks * len(COLUMNS) * len(STATS)))


def _html(saved: dict[str, Any]) -> str:
    files = static_files()
    styles = "\n".join(files[name].decode() for name in ("uplot.min.css", "base.css", "page.css"))
    scripts = [files["uplot.min.js"].decode(), bundle(files, "app.js")]
    # Nothing that a run says can end the element that it is in, whatever its names are.
    data = json.dumps(saved, separators=(",", ":")).replace("<", "\\u003c").replace("\u2028", "\\u2028")
    allowed = " ".join(f"'sha256-{_sha256(text)}'" for text in scripts)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'sha256-{_sha256(styles)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = [
        f'<!doctype html>\n<html lang="{saved["lang"]}">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer">\n<title>dure</title>',
        '<link rel="icon" href="data:,">',
        f'<style>{styles}</style>\n</head>\n<body>\n<div id="app"></div>',
        f'<script type="application/json" id="saved">{data}</script>',
        *(f"<script>{text}</script>" for text in scripts),
        "</body>\n</html>\n",
    ]
    return "\n".join(parts)


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _browser() -> str:
    for name in _BROWSERS:
        found = shutil.which(name)
        if found is not None:
            return found
    raise UsageError("--pdf prints with Chromium, and there is none here; leave it out, or install chromium")


def _print(browser: str, html: Path, out: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="dure-report-") as folder:
        printed = Path(folder) / "report.pdf"
        command = [
            browser,
            "--headless",
            "--no-sandbox",  # what it opens is the file that was just written here
            "--disable-gpu",
            "--disable-background-networking",
            f"--user-data-dir={folder}/profile",
            "--no-pdf-header-footer",
            "--virtual-time-budget=4000",
            f"--print-to-pdf={printed}",
            html.absolute().as_uri(),
        ]
        try:
            subprocess.run(command, capture_output=True, timeout=_PDF_SECONDS, check=True)
            write_whole(out, printed.read_bytes())
        except (subprocess.SubprocessError, FileNotFoundError) as error:
            raise UsageError(
                f"{browser} could not print {html}: {type(error).__name__}; leave out --pdf"
            ) from None
