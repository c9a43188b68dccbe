"""The folder of a run: which one, made or moved aside, for one launch alone."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

from dure.base.errors import UsageError
from dure.base.files import read_at_most, write_whole
from dure.base.run_folder import RunFolder
from dure.base.say import say
from dure.config import LoadedJob
from dure.launch.run_lock import RunLock


def default_folder(loaded: LoadedJob, *, several_nodes: bool) -> Path | None:
    """On several nodes, a place that all of them see."""
    if not several_nodes or "://" in loaded.storage:
        return None
    return loaded.run_in_storage(time.strftime("%Y%m%d-%H%M%S"))


def named_by_time(name: str) -> Path:
    """The folder of a run that was given none."""
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def set_aside(folder: RunFolder) -> None:
    """Move an earlier run out of the way; nothing is deleted."""
    path = folder.path
    aside = next(
        place for n in itertools.count(1) if not (place := path.with_name(f"{path.name}.{n}")).exists()
    )
    with RunLock(folder):  # nobody trains there
        try:
            path.rename(aside)
        except OSError as error:
            raise UsageError(f"cannot move the earlier run {path} to {aside}: {error.strerror}") from None
    say(f"the earlier run is in {aside} now")


@contextlib.contextmanager
def new_run(
    run_dir: Path | None,
    name: str,
    *,
    goes_on: bool = False,
    fresh: bool = False,
    lock_seconds: float = 0.0,
) -> Iterator[RunFolder]:
    """The run's folder, for this launch alone: one that holds no run yet, unless this is a run that `goes_on`.

    Another launch that has it is given `lock_seconds` to let go. When the command is refused within (UsageError), a
    folder that was made for it is taken away again.
    """
    path = run_dir or named_by_time(name)
    folder = RunFolder(path.absolute())
    if fresh and (folder.job.exists() or folder.script.exists()):
        set_aside(folder)
    elif folder.job.exists() and not goes_on:
        raise UsageError(
            f"{path} holds a run already, and this one has no checkpoints to go on from; give another --run-dir"
        )
    made = [place for place in (folder.path, *folder.path.parents) if not place.exists()]
    try:
        folder.create()
    except (OSError, ValueError) as error:  # ValueError: a NUL character in its path
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"cannot make the run folder {path}: {reason}; give another --run-dir") from None
    try:
        with RunLock(folder, lock_seconds):
            yield folder
    except UsageError:
        if folder.path in made:
            folder.empty()
            with contextlib.suppress(OSError):  # somebody else uses it, or there is something in it
                for place in made:
                    place.rmdir()
        raise


def write_job(folder: RunFolder, loaded: LoadedJob) -> None:
    """Keep the job as it runs; a run that goes on may find it there already, on a disk that is full by now."""
    text = loaded.to_json().encode()
    with contextlib.suppress(OSError):
        if read_at_most(folder.job, len(text)) == text:
            return
    try:
        write_whole(folder.job, text)
    except OSError as error:
        raise UsageError(
            f"cannot write {folder.job}: {error.strerror}; make room, or give another --run-dir"
        ) from None
