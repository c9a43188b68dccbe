"""Where a lab writes down what it is, so that another command finds it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from dure.base.errors import DureError, UsageError
from dure.base.files import write_whole
from dure.tools.lab.machine import SETUP_SECONDS
from dure.tools.lab.place import Place

_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class State:
    """A lab's places and how they were made."""

    storage: str
    rate: str | None
    ssh: bool
    login: Place
    nodes: tuple[Place, ...]
    whole: bool = False
    """Whether the lab was finished; what is not is the rest of one that failed."""

    @property
    def places(self) -> tuple[Place, ...]:
        """The processes that keep the places."""
        return (self.login, *self.nodes)

    @property
    def running(self) -> bool:
        """Whether every place is there."""
        return self.whole and all(place.alive for place in self.places)


def lab_folder(name: str) -> Path:
    """Where the lab of this name keeps its files."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{,31}", name) is None:
        raise UsageError(f"a lab cannot be called {name!r}; use up to 32 letters, digits, - and _")
    return _parent() / name


def all_names() -> list[str]:
    """The labs that there are, or rests of."""
    return sorted(path.name for path in _parent().iterdir() if path.is_dir()) if _parent().is_dir() else []


def write_state(folder: Path, state: State) -> None:
    """Write it down, whole."""
    write_whole(folder / "lab.json", json.dumps(asdict(state), indent=1))


def read_state(folder: Path) -> State | None:
    """What is written down, or None where there is nothing."""
    try:
        raw = json.loads((folder / "lab.json").read_text())
    except FileNotFoundError:
        return None
    raw["login"] = Place(**raw["login"])
    raw["nodes"] = tuple(Place(**node) for node in raw["nodes"])
    return State(**raw)


def remove(folder: Path) -> None:
    """Remove a lab's files, and the folder of all labs with the last of them."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One command at a time makes or ends a lab. The lock is on the folder itself, so no file is left."""
    deadline = time.monotonic() + SETUP_SECONDS
    while True:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.stat(folder).st_ino == os.fstat(descriptor).st_ino:
                    break
            except (BlockingIOError, FileNotFoundError):
                pass
            os.close(descriptor)
        if time.monotonic() > deadline:
            raise DureError(f"another command is making or ending the lab in {folder}; try again")
        time.sleep(_LOOK_SECONDS)
    try:
        yield
    finally:
        os.close(descriptor)


def _parent() -> Path:
    base = Path("/run")
    return (base if os.access(base, os.W_OK) else Path(tempfile.gettempdir())) / "dure-lab"
