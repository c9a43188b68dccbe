"""Where the page keeps what it made of a long run: in its folder, or in one of its own when that is refused."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from dure.base.files import make_own_folder


class Cache:
    """A folder that is made when something is to be written; short runs never need it."""

    def __init__(self, wanted: Path) -> None:
        self.path = wanted
        self._made = False
        self._is_temporary = False

    def make(self) -> None:
        """Make the folder, or one for temporary files where this run's cannot be written."""
        if self._made:
            return
        try:
            make_own_folder(self.path)
            if not os.access(self.path, os.W_OK | os.X_OK):
                raise PermissionError
        except OSError:
            self.path = Path(tempfile.mkdtemp(prefix="dure-page-"))
            self._is_temporary = True
        self._made = True

    def close(self) -> None:
        """Take away a temporary folder."""
        if self._is_temporary:
            shutil.rmtree(self.path, ignore_errors=True)
