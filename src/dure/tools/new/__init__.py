"""A project to start from: a job, its model and data, a script and a README that train at once."""

from __future__ import annotations

import re
from pathlib import Path

from dure.base.errors import UsageError
from dure.base.files import write_whole
from dure.base.language import Language

TEMPLATE = Path(__file__).parent / "template"
FILES = ("README.md", "job.toml", "parts.py", "train.py")


def write_project(folder: Path, language: Language) -> list[Path]:
    """Write the project's files into a folder, which is made; what is there already is never written over."""
    existing = [name for name in FILES if (folder / name).exists()]
    if existing:
        raise UsageError(f"{folder / existing[0]} exists already; give another folder: dure new DIR")
    name = _job_name(folder)
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in FILES:
            source = "README.ko.md" if file == "README.md" and language == "ko" else file
            text = (TEMPLATE / source).read_text(encoding="utf-8").replace("{name}", name)
            write_whole(folder / file, text)
            written.append(folder / file)
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"cannot write the project into {folder}: {reason}; give another folder: dure new DIR"
        ) from None
    return written


def _job_name(folder: Path) -> str:
    """The folder's own name as a job may be called."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", folder.absolute().name).strip("-_")[:40] or "project"
