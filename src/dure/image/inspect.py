"""Read what an image says of itself, without running anything in it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from dure.errors import UsageError
from dure.image.contents import MANIFEST


def manifest_of(image: Path) -> dict[str, Any]:
    """The manifest that `dure image build` put in."""
    if shutil.which("unsquashfs") is None:
        raise UsageError("there is no unsquashfs; install squashfs-tools")
    read = subprocess.run(
        ["unsquashfs", "-cat", str(image.absolute()), MANIFEST.lstrip("/")],
        capture_output=True,
        timeout=60,
        check=False,
    )
    try:
        found = json.loads(read.stdout)
    except ValueError:
        raise UsageError(f"{image} has no {MANIFEST}: it was not built by `dure image build`") from None
    return dict(found)
