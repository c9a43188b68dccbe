"""Whether an image can be built and run here."""

from __future__ import annotations

import functools
import shutil
import subprocess


@functools.cache
def why_no_image_here() -> str | None:
    """What is missing to build an image and run in it; None when nothing is."""
    missing = [name for name in ("mksquashfs", "unsquashfs", "bwrap") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed (squashfs-tools, bubblewrap)"
    tried = subprocess.run(
        ["bwrap", "--ro-bind", "/", "/", "--unshare-pid", "--proc", "/proc", "--dev", "/dev", "true"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return None if tried.returncode == 0 else f"bubblewrap does not work here: {tried.stderr.strip()}"
