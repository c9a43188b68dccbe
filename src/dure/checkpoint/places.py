"""Where a run's checkpoints are. No torch: the doctor looks there too."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from dure.base.errors import UsageError
from dure.base.files import make_folders, make_own_folder, read_at_most
from dure.base.run_folder import RunFolder
from dure.base.say import printable
from dure.config import LONGEST_JOB, Checkpoint, LoadedJob
from dure.storage import Store, open_store


@dataclass(frozen=True)
class Places:
    """Where the checkpoints of one run are."""

    run: RunFolder
    storage: str
    """A folder, or s3://bucket/prefix."""
    rescue: str | None = None
    """Where states go that the storage refuses, if the user says: a folder, or s3://bucket/prefix."""
    is_run_given: bool = True
    """Whether the run's folder is what `--run-dir` says; a script may name the storage itself."""
    is_script: bool = False
    """Whether a script says what else there is to say, not a command line."""

    @property
    def again(self) -> str:
        """What makes the run go on, in words."""
        return f"the same command with --run-dir {self.run.path}" if self.is_run_given else "the same command"

    def with_rescue(self, folder: str) -> str:
        """What makes a run look for its state in this rescue folder, in words."""
        return f"rescue={folder!r} in team.checkpoint" if self.is_script else f"--rescue-dir {folder}"

    @classmethod
    def of(cls, settings: Checkpoint, run: RunFolder, *, storage: str | Path, base: Path) -> Places:
        """What the settings come to for this run. `storage` stands for `{storage}`, and a relative `rescue` is in
        `base`."""
        rescue = settings.rescue
        if rescue is not None and "://" not in rescue:
            rescue = str(base / rescue)
        return cls(run, _storage_place(settings, run, storage), rescue)

    @classmethod
    def of_job(cls, loaded: LoadedJob, run: RunFolder) -> Places:
        """Those of a run of this job."""
        return cls.of(loaded.job.checkpoint, run, storage=loaded.storage, base=loaded.folder)

    @property
    def rescue_key(self) -> str:
        """What tells this run from others in the rescue folder."""
        return f"{self.run.path.name}-{hashlib.sha256(os.fsencode(self.run.path)).hexdigest()[:8]}"

    @property
    def rescued(self) -> list[str]:
        """Where an earlier session of this run may have saved its last state."""
        return [] if self.rescue is None else [f"{self.rescue.rstrip('/')}/{self.rescue_key}"]

    def open_to_write(self) -> Store:
        """The storage of this run's checkpoints; a folder is made."""
        place = self.storage
        if "://" not in place:
            try:
                make_folders(Path(place))
                if Path(place).is_relative_to(self.run.path):
                    make_own_folder(Path(place))
            except OSError as error:
                raise UsageError(
                    f"cannot make the folder for checkpoints, {place}: {error.strerror}; choose another "
                    "checkpoint.folder"
                ) from None
        return open_store(place)


def _storage_place(settings: Checkpoint, run: RunFolder, storage: str | Path) -> str:
    text = settings.folder.replace("{storage}", str(storage)).replace("{run}", run.path.name)
    return text if "://" in text else str(run.path / text)


def open_to_read(run: RunFolder) -> Store:
    """The checkpoints of a run that is or was, of a job or a script; `run` may also be a folder of checkpoints."""
    place = _place_of_job(run) or _place_of_script(run)
    if "://" not in place and not Path(place).is_dir():
        raise UsageError(f"{run.path} has no checkpoints: there is no folder {place}")
    return open_store(place, read_only=True)


def _place_of_job(run: RunFolder) -> str:
    """ "" when the folder holds no run of a job."""
    try:
        loaded = LoadedJob.from_json(read_at_most(run.job, LONGEST_JOB * 4).decode())
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else printable(str(error), 300)
        raise UsageError(f"{run.job} cannot be read: {reason}") from None
    return Places.of_job(loaded, run).storage


def _place_of_script(run: RunFolder) -> str:
    """What a script said, else where scripts save by themselves, else this very folder."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        told = str(json.loads(read_at_most(run.script, LONGEST_JOB))["checkpoints"])
        return told if "://" in told else str(run.path / told)
    for place in (run.path / Checkpoint().folder, run.path):
        if next(place.glob("step-*/manifest.json"), None) is not None:
            return str(place)
    raise UsageError(f"{run.path} holds no run: there is no {run.job.name} and no checkpoint in it")
