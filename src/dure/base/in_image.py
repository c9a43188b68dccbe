"""Whether this process runs inside a container image, and which."""

from __future__ import annotations

import os
from collections.abc import Mapping

IN_IMAGE = "DURE_IMAGE"
"""Set inside an image to its sha256."""


def digest_inside(environ: Mapping[str, str] = os.environ) -> str | None:
    """The sha256 of the image that this process is in, or None."""
    return environ.get(IN_IMAGE) or None
