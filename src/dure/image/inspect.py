"""Read what an image says of itself, without running anything in it."""

from __future__ import annotations

import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pydantic_core

from dure.base.errors import UsageError
from dure.image.contents import MANIFEST

_LONGEST = 16 << 20
_SECONDS = 60.0


def manifest_of(image: Path) -> dict[str, Any]:
    """The manifest that `dure image build` put in."""
    if shutil.which("unsquashfs") is None:
        raise UsageError("there is no unsquashfs; install squashfs-tools")
    command = ["unsquashfs", "-cat", str(image.absolute()), MANIFEST.lstrip("/")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as reading:
        assert reading.stdout is not None
        timer = threading.Timer(_SECONDS, reading.kill)
        timer.start()
        content = reading.stdout.read(_LONGEST + 1)
        timer.cancel()
        reading.kill()  # whoever has more to say than that has no manifest of ours
    try:
        found = pydantic_core.from_json(content) if len(content) <= _LONGEST else None
    except ValueError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("packages"), dict):
        raise UsageError(f"{image} has no {MANIFEST}: it was not built by `dure image build`")
    return found
