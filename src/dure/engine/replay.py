"""Compute steps of a run again, on any number of ranks, and compare every record of its receipt.

A replay is a run of the same job in a folder of its own that begins with a copy of the receipt and of the checkpoint
before the first step: steps that a receipt has already are compared, not written.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dure.base.errors import RankFailed, ReceiptWrong, UsageError
from dure.base.files import read_at_most
from dure.base.language import chosen_language
from dure.base.run_folder import RunFolder
from dure.checkpoint.places import Places
from dure.config import LONGEST_JOB, Cluster, LoadedJob
from dure.config.limits import LONGEST_SECONDS
from dure.config.sections import Checkpoint, Eval, Job
from dure.engine.run_job import launch_ranks
from dure.proof.compare_receipts import State, last_state
from dure.proof.stored_tensors import of_checkpoint
from dure.proof.verify_receipt import ReceiptFolder, Verified, verify


@dataclass(frozen=True)
class Replayed:
    """Steps that were computed again, and what came of it."""

    first: int
    end: int
    start: int
    """Of the state that it began with; 0: the first weights."""
    ranks: int
    difference: str = ""
    """The first one, "" when all records are the same."""
    state: State | None = None
    """Of the model in the end; None after a difference."""

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {name: value for name, value in vars(self).items() if name != "state"}


def replay(run: Path, first: int, end: int | None, ranks: int) -> Replayed:
    """Compute the steps from `first` to `end` (not with it) again."""
    found = _verified(run)
    last = found.steps if end is None else end
    if not 0 <= first < last <= found.steps:
        raise UsageError(f"--steps {first}:{last}: the receipt has steps 0 to {found.steps - 1}")
    start, place = _state_before(run, first)
    return _replay_from(run, place, Replayed(first, last, start, ranks))


def state_after(run: Path, steps: int, ranks: int, *, newest: int) -> Replayed:
    """Compute a run again up to its state after so many steps, from a checkpoint that is not newer than `newest`."""
    start, place = _state_before(run, min(steps - 1, newest))
    return _replay_from(run, place, Replayed(start, steps, start, ranks))


def replay_spots(run: Path, spots: int, ranks: int, seed: int | None = None) -> list[Replayed]:
    """Replay up to `spots` random steps, each from the checkpoint before it; stops at the first difference."""
    found = _verified(run)
    chosen = sorted(random.Random(seed).sample(range(found.steps), min(spots, found.steps)))
    by_start: dict[int, tuple[Path | None, list[int]]] = {}
    for step in chosen:
        start, place = _state_before(run, step)
        by_start.setdefault(start, (place, []))[1].append(step)
    done: list[Replayed] = []
    for start, (place, steps) in by_start.items():
        done.append(_replay_from(run, place, Replayed(steps[0], steps[-1] + 1, start, ranks)))
        if done[-1].difference:
            break
    return done


def _verified(run: Path) -> Verified:
    try:
        return verify(run)
    except ReceiptWrong as error:
        raise ReceiptWrong(f"there is nothing to compare with: {error}") from None


def checkpoints_of(run: Path) -> dict[int, Path]:
    """Whole checkpoints of a run in a folder, by how many steps they have."""
    folder = Places.of_job(_job_of(run), RunFolder(run.absolute())).storage
    found = {}
    for place in sorted(Path(folder).glob("step-*")) if "://" not in folder else []:
        with contextlib.suppress(ReceiptWrong, OSError):
            found[of_checkpoint(place)[0]] = place
    return found


def _state_before(run: Path, step: int) -> tuple[int, Path | None]:
    """(steps done, its folder) of the newest checkpoint that is not after a step."""
    known = {done: place for done, place in checkpoints_of(run).items() if done <= step}
    return (max(known), known[max(known)]) if known else (0, None)


def _job_of(run: Path) -> LoadedJob:
    try:
        return LoadedJob.from_json(read_at_most(RunFolder(run).job, LONGEST_JOB * 4).decode())
    except FileNotFoundError:
        raise UsageError(
            f"{run} holds no job: a script's run cannot be replayed, as nobody but the script knows what it computes "
            "(`dure verify` checks its receipt); start the script again in another folder, and compare by `dure diff`"
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{run} cannot be replayed: its job cannot be read ({error})") from None


def _replay_from(run: Path, place: Path | None, wanted: Replayed) -> Replayed:
    loaded = _to_replay(_job_of(run), wanted)
    with tempfile.TemporaryDirectory(prefix="dure-replay-") as name:
        folder = RunFolder(Path(name) / "run")
        shutil.copytree(ReceiptFolder.of(run).path, folder.receipt)
        folder.receipt_replay.touch()
        if place is not None:
            shutil.copytree(place, folder.path / "checkpoints" / place.name, copy_function=_link_or_copy)
        try:
            launch_ranks(loaded, folder, chosen_language(None))
        except RankFailed as failed:
            if failed.exit_code != ReceiptWrong.exit_code:
                raise
            return replace(wanted, difference=str(failed))
        return replace(wanted, state=last_state(folder.receipt))


def _to_replay(loaded: LoadedJob, wanted: Replayed) -> LoadedJob:
    """The same recipe; what costs time and changes no bit is left out."""
    job = loaded.job
    if wanted.ranks > job.team.shards:
        raise UsageError(f"--ranks {wanted.ranks}: the run has {job.team.shards} shards; use at most so many")
    parts: dict[str, Any] = {
        "train": job.train.model_copy(
            update={"epochs": None, "steps": wanted.end, "prove_every": 0, "audit": 0.0}
        ),
        "team": job.team.model_copy(update={"ranks": wanted.ranks, "min_ranks": None, "max_restarts": 0}),
        "checkpoint": Checkpoint(every_seconds=LONGEST_SECONDS, memory_every=0),
        "cluster": Cluster(),
        "eval": Eval(),
    }
    told = job.model_copy(update=parts).model_dump(mode="json")
    return LoadedJob(Job.model_validate(told), loaded.folder, loaded.sources)


def _link_or_copy(source: str, target: str) -> None:
    """A second name for the same bytes where the file system has it: a checkpoint may be large."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def in_words(done: Sequence[Replayed]) -> Iterator[str]:
    """A line each."""
    for one in done:
        began = f"from the checkpoint of step {one.start}" if one.start else "from the first weights"
        verdict = one.difference or "the same"
        yield f"steps {one.first} to {one.end - 1}, {began}, on {one.ranks} rank(s): {verdict}"
