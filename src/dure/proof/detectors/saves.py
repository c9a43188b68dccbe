"""torch.save and torch.load: several ranks that write one file, and a run that goes on at another place than it saved.

torch lets packages take part in saving and loading storages (`torch.serialization.register_package`). Ours has nothing
to save: it sees that something is saved, and finds the file in the frame of torch.save.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import socket
import sys
from typing import TYPE_CHECKING, Any

import torch

from dure.base.files import read_at_most, write_whole
from dure.base.run_folder import RunFolder
from dure.proof.detectors.board import ranks_in_words
from dure.proof.detectors.report import Report, script_place
from dure.proof.detectors.samplers import Reading

if TYPE_CHECKING:
    from dure.proof.detectors.watch import Watch

_priorities = itertools.count(-7301, -1)
"""Before torch's own packages, which begin at 10. torch cannot sort two packages of one priority."""
_LONGEST = 1 << 20
_MOST_FILES = 1000


class SavesLook:
    """Looks at the files of torch.save and torch.load."""

    def __init__(self, watch: Watch, folder: RunFolder | None) -> None:
        self._watch, self._folder = watch, folder
        self._written: set[str] = set()
        self._saved: dict[str, dict[str, int]] = {}
        """By file: where in the epoch the script was. Of this run's earlier processes until this one saves."""
        self._resumed: dict[str, int] | None = None
        """Where the script was when it saved what it has loaded; None once it trains."""

    def begin(self) -> None:
        """Take part in torch.save and torch.load."""
        if self._folder is not None:
            with contextlib.suppress(OSError, ValueError):
                self._saved = dict(json.loads(read_at_most(self._folder.positions, _LONGEST)))
        saving, loading = self._watch.guarded(self._saving), self._watch.guarded(self._loading)

        def tag(_: Any) -> None:
            saving()

        def restore(_: Any, __: str) -> None:
            loading()

        torch.serialization.register_package(next(_priorities), tag, restore)

    def _saving(self) -> None:
        path = _file_of(torch.save.__code__)
        if path is None:
            return
        board, reading = self._watch.board, self._watch.samplers.training
        if path not in self._written and board is not None:
            self._written.add(path)
            # Two nodes may have a folder of the same name each.
            key = hashlib.sha256(f"{socket.gethostname()} {path}".encode(errors="replace")).hexdigest()
            writers = board.join(f"writer/{key}")
            if len(writers) > 1:
                text = (
                    f"{ranks_in_words(writers)} write one file, {os.path.basename(path)}, and what is in it may be "
                    "of any of them; save on one rank (if dist.get_rank() == 0), and wait in a barrier"
                )
                self._watch.tell(Report(text, "writers", script_place()))
        if reading is not None and board is not None and board.rank == 0 and self._folder is not None:
            self._note_place(path, reading, self._folder)

    def _note_place(self, path: str, reading: Reading, folder: RunFolder) -> None:
        place = {"epoch": reading.epoch, "drawn": reading.drawn, "samples": reading.samples}
        if self._saved.get(path) != place and len(self._saved) < _MOST_FILES:
            self._saved[path] = place
            with contextlib.suppress(OSError):
                write_whole(folder.positions, json.dumps(self._saved))

    def _loading(self) -> None:
        path = _file_of(torch.load.__code__)
        if (
            path is not None
            and self._watch.updates == 0
            and path in self._saved
            and path not in self._written
        ):
            self._resumed = self._saved[path]

    def begins_to_train(self) -> None:
        """The first training pass after a file was loaded."""
        saved, reading = self._resumed, self._watch.samplers.training
        self._resumed = None
        if saved is None or reading is None or saved["samples"] != reading.samples:
            return
        left = saved["samples"] - saved["drawn"]
        if left <= 0:
            return
        if reading.epoch == saved["epoch"] and reading.drawn < saved["drawn"]:
            text = (
                f"the run goes on in the middle of epoch {reading.epoch}, but reads it from its beginning: each "
                "rank's first "
                f"{saved['drawn']} samples are trained on again; skip the batches that were done (team.checkpoint does)"
            )
            self._watch.tell(Report(text, "resume", script_place()))
        elif reading.epoch == saved["epoch"] + 1:
            text = (
                f"the run was saved in the middle of epoch {saved['epoch']} and goes on with epoch "
                f"{reading.epoch}: each "
                f"rank's last {left} samples are skipped; go on in the middle, or save at the end of epochs "
                "(team.checkpoint goes on at the sample that comes next)"
            )
            self._watch.tell(Report(text, "resume", script_place()))


def _file_of(code: Any) -> str | None:
    """The file that the nearest call of a function of torch.serialization was given."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return None
    file = frame.f_locals.get("f")
    name = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
    return os.path.realpath(name) if isinstance(name, str | os.PathLike) else None
