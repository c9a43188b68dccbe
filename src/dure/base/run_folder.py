"""The names of all files of one run, in one place."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from dure.base.files import make_own_folder

_FOLDERS = ("events", "logs", "errors", "stacks", "heartbeat")


@dataclass(frozen=True)
class RunFolder:
    """Where a run keeps its files. Making the value touches nothing; `create` makes the folders."""

    path: Path

    @property
    def job(self) -> Path:
        """The job as it ran: every setting, as JSON."""
        return self.path / "job.json"

    @property
    def script(self) -> Path:
        """Here as soon as a script saves checkpoints (`team.checkpoint`): where they are, as JSON."""
        return self.path / "script.json"

    @property
    def summary(self) -> Path:
        """What `--json` prints, written when the run is done."""
        return self.path / "summary.json"

    @property
    def restarts(self) -> Path:
        """When and why the team was started again, one JSON object a line; not there if it never was."""
        return self.path / "restarts.jsonl"

    @property
    def lock(self) -> Path:
        """Locked by the launcher whose run this is; tells its host and pid."""
        return self.path / "launcher.lock"

    @property
    def stop(self) -> Path:
        """Here while the run is asked to stop at its next step."""
        return self.path / "stop"

    @property
    def receipt(self) -> Path:
        """The run's receipt: a chain of hashes over its steps (see `proof/receipt.py`)."""
        return self.path / "receipt"

    @property
    def receipt_head(self) -> Path:
        """What the run depends on; its chain begins with this file's hash."""
        return self.receipt / "head"

    @property
    def receipt_replay(self) -> Path:
        """Here where a run is a replay of another one: then every step must be what the receipt says."""
        return self.receipt / "replay"

    @property
    def receipt_steps(self) -> Path:
        """The chain's records."""
        return self.receipt / "steps"

    @property
    def samples(self) -> Path:
        """Hashes of what the run's samples contained when they were first read."""
        return self.receipt / "samples"

    @property
    def mistakes(self) -> Path:
        """Silent mistakes of a script that were noticed, one JSON object a line; not there if there were none."""
        return self.path / "mistakes.jsonl"

    @property
    def positions(self) -> Path:
        """Where in its epoch a stock script was when it saved a file, as JSON, by file."""
        return self.path / "positions.json"

    def asked_to_stop(self) -> bool:
        """Whether `stop` is here; a storage that does not answer asks for nothing."""
        try:
            return self.stop.exists()
        except OSError:
            return False

    def all_events(self) -> list[Path]:
        """What all ranks recorded, in all sessions of the run: there may have been more ranks before."""
        return sorted((self.path / "events").glob("rank-*.jsonl"))

    def events(self, rank: int) -> Path:
        """What this rank recorded, one JSON object a line."""
        return self.path / "events" / f"rank-{rank}.jsonl"

    def log(self, rank: int) -> Path:
        """All that this rank printed."""
        return self.path / "logs" / f"rank-{rank}.log"

    def error(self, rank: int) -> Path:
        """How this rank failed, in its own words (JSON)."""
        return self.path / "errors" / f"rank-{rank}.json"

    def stacks(self, rank: int) -> Path:
        """Where this rank stood when the team waited too long."""
        return self.path / "stacks" / f"rank-{rank}.txt"

    def heartbeat(self, rank: int) -> Path:
        """What this rank does right now (a few bytes, mapped by the rank and the launcher)."""
        return self.path / "heartbeat" / f"rank-{rank}"

    @property
    def page(self) -> Path:
        """What `dure page` keeps to be quick with long runs; it can be deleted at any time."""
        return self.path / "page"

    def create(self) -> None:
        """Make the folders that the ranks write into; PermissionError when one of them is another user's."""
        make_own_folder(self.path)
        for name in _FOLDERS:
            make_own_folder(self.path / name)

    def empty(self) -> None:
        """Take away what `create` and the launcher's lock have made, as far as nothing was written into it."""
        for name in _FOLDERS:
            with contextlib.suppress(OSError):
                (self.path / name).rmdir()
        if [entry.name for entry in self.path.iterdir()] == [self.lock.name]:
            self.lock.unlink()
