"""From what a person wrote to a store."""

from __future__ import annotations

import re
from pathlib import Path

from dure.base.errors import UsageError
from dure.storage.bucket import BucketStore
from dure.storage.folder import FolderStore
from dure.storage.layout import EVERYTHING, NOTHING, Layout
from dure.storage.protocol import Store


def open_store(location: str | Path, *, read_only: bool = False, layout: Layout | None = None) -> Store:
    """The storage at `location`: a folder, or `s3://bucket/prefix`.

    With a `layout`, only its `checkpoints/` can be written; with `read_only`, nothing. Opening a bucket sends
    nothing yet; a folder must be there.
    """
    rights = NOTHING if read_only else EVERYTHING if layout is None else layout.rights
    text = str(location)
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", text)
    if scheme is None:
        return FolderStore(text, rights)
    if scheme[1] == "s3":
        return BucketStore(text, rights)
    raise UsageError(f"{text}: storage is a folder or s3://bucket/prefix; {scheme[1]}:// is neither")
