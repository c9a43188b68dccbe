"""Where a run's checkpoints are."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from dure.base.errors import UsageError
from dure.base.files import make_folders, make_own_folder, read_at_most
from dure.base.run_folder import RunFolder
from dure.base.say import printable
from dure.config import LONGEST_JOB, LoadedJob
from dure.storage import Store, open_store


def location(loaded: LoadedJob, run: RunFolder) -> str:
    """What `checkpoint.folder` comes to for this run."""
    text = loaded.job.checkpoint.folder
    text = text.replace("{storage}", str(loaded.storage)).replace("{run}", run.path.name)
    return text if "://" in text else str(run.path / text)


def rescue_folder(loaded: LoadedJob) -> str | None:
    """Where states go that the run's own storage refuses, if the user says."""
    folder = loaded.job.checkpoint.rescue
    return folder if folder is None or "://" in folder else str(loaded.folder / folder)


def rescue_key(run: RunFolder) -> str:
    """What tells this run from others in such a folder."""
    return f"{run.path.name}-{hashlib.sha256(os.fsencode(run.path)).hexdigest()[:8]}"


def rescued_states(loaded: LoadedJob, run: RunFolder) -> list[str]:
    """Where an earlier session of this run may have saved its last state."""
    folder = rescue_folder(loaded)
    return [] if folder is None else [f"{folder.rstrip('/')}/{rescue_key(run)}"]


def open_to_write(loaded: LoadedJob, run: RunFolder) -> Store:
    """The storage of this run's checkpoints; a folder is made."""
    place = location(loaded, run)
    if "://" not in place:
        try:
            make_folders(Path(place))
            if Path(place).is_relative_to(run.path):
                make_own_folder(Path(place))
        except OSError as error:
            raise UsageError(
                f"cannot make the folder for checkpoints, {place}: {error.strerror}; choose another checkpoint.folder"
            ) from None
    return open_store(place)


def open_to_read(run: RunFolder) -> Store:
    """The checkpoints of a run that is or was."""
    try:
        loaded = LoadedJob.from_json(read_at_most(run.job, LONGEST_JOB * 4).decode())
    except FileNotFoundError:
        raise UsageError(f"{run.path} holds no run: there is no {run.job.name} in it") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else printable(str(error), 300)
        raise UsageError(f"{run.job} cannot be read: {reason}") from None
    place = location(loaded, run)
    if "://" not in place and not Path(place).is_dir():
        raise UsageError(f"{run.path} has no checkpoints: there is no folder {place}")
    return open_store(place, read_only=True)
