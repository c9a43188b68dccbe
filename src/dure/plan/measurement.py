"""What was measured of a job on this machine, as a file: the planner reads it, and needs no torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from pydantic import ValidationError

from dure.base.errors import UsageError
from dure.base.files import read_at_most, write_whole
from dure.base.say import printable
from dure.config import LoadedJob
from dure.config.section import Section
from dure.plan.links import Link, Links

LONGEST_FILE = 1 << 20
VERSION = 1


class Timed(Section):
    """A median, and how sure it is."""

    seconds: float
    spread: float
    """Half the distance between the quartiles, as a part of the median."""


class Measurement(Section):
    """One job, measured on one machine."""

    version: int = VERSION
    job: str
    settings: str
    """Hash of the settings that it depends on; see `settings_hash`."""
    host: str
    cores: int
    """Ranks that can compute at once: the cores that may be used, by the threads of a rank."""
    device: str
    tflops: float
    """Of one rank, multiplying matrices of fp32."""
    memory_gib: float
    """Of the machine."""
    parameters: int
    samples: int
    batch: int
    shards: int
    steps: int
    """Of the whole job."""
    shard: Timed
    """One shard forward and backward, by one rank alone."""
    update: Timed
    data: Timed
    """Waiting for the samples of one shard."""
    jitter: float
    """Standard deviation of a rank's step, as a part of it."""
    crowding: float
    """How much longer a rank computes when all cores do."""
    exchange: dict[int, Timed]
    """One all-reduce of so many bytes."""
    exchange_ranks: int
    """Of those all-reduces, all on this machine."""
    state_bytes: int
    """Of a checkpoint."""
    save_stall: Timed
    """What one checkpoint takes of the step path."""
    storage_bytes_per_second: float
    rank_bytes: int
    """Largest resident memory of a rank."""
    start_seconds: float
    """From the command to the first step."""

    @property
    def links(self) -> Links:
        """This machine's: latency and bandwidth from the smallest and the largest all-reduce."""
        points = sorted(self.exchange.items())
        (least, few), (most, many) = points[0], points[-1]
        each = max((many.seconds - few.seconds) / (most - least), 1e-15) if most > least else 1e-15
        hop = max(few.seconds - each * least, 0.0)
        inside = Link(1.0 / each, hop)
        return Links(inside, inside)


def settings_hash(loaded: LoadedJob) -> str:
    """Of all settings that change what a sample takes; not where it runs, how long, or how a batch is cut."""
    job = loaded.job.model_dump(mode="json")
    kept = {name: job[name] for name in ("model", "data", "reduce")}
    kept["data"].pop("global_batch")
    train = {name: value for name, value in job["train"].items() if name not in ("epochs", "steps")}
    team = {name: job["team"][name] for name in ("threads", "arithmetic", "device")}
    text = json.dumps([kept, train, team], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_measurement(path: Path, measured: Measurement) -> None:
    """The whole file or none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, measured.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}; give another place: --measured FILE"
        ) from None


def read_measurement(path: Path) -> Measurement:
    """UsageError for what is none."""
    try:
        found = Measurement.model_validate_json(read_at_most(path, LONGEST_FILE))
    except (OSError, ValidationError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "other fields, or other types"
        raise UsageError(
            f"{printable(str(path))} cannot be read as a measurement of dure plan ({reason}); measure again: --measure"
        ) from None
    if found.version != VERSION or not found.exchange:
        raise UsageError(f"{printable(str(path))} is of another version of dure; measure again: --measure")
    return found
