"""Writes one checkpoint at a time, off the step path, and lets old ones go.

Every rank writes its share; rank 0 writes the manifest when all shares are there. In a folder, all that happens under
another name, and a rename makes it a checkpoint; in a bucket, the manifest does. So a crash at any moment leaves what
was there before, and whatever goes wrong is told and costs this one checkpoint only.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import torch

from dure.base.errors import DureError, StorageError
from dure.checkpoint.find import entries
from dure.checkpoint.manifest import (
    MANIFEST,
    PREFIX,
    SAVING,
    File,
    Manifest,
    check_files,
    remove_checkpoint,
    remove_unfinished,
)
from dure.checkpoint.snapshot import Background, Snapshot
from dure.checkpoint.state import State, disagreeing
from dure.comm.group import Group
from dure.storage import Store

WRITE_SECONDS = 1800.0
"""How long the ranks' writing threads wait for each other."""


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay."""

    last: int = 2
    every: int = 0
    """Steps: those of multiples stay for good; 0: none."""
    best: str | None = None
    """A metric whose best checkpoint stays; the loss is best when low, others when high."""


@dataclass(frozen=True)
class Saved:
    """What is known of a whole checkpoint."""

    name: str
    step: int
    metrics: dict[str, float]
    """Of an evaluation at exactly this step; empty when there was none."""


def removable(saved: Sequence[Saved], keep: Retention) -> list[str]:
    """The names of those that may go, the oldest first; never the newest. `saved` may come in any order."""
    by_step = sorted(saved, key=lambda each: each.step)
    stay = {each.name for each in by_step[-max(keep.last, 1) :]}
    stay |= {each.name for each in by_step if keep.every and each.step % keep.every == 0}
    if keep.best is not None:
        evaluated = [each for each in by_step if not math.isnan(each.metrics.get(keep.best, math.nan))]
        if evaluated:
            sign = 1 if keep.best == "loss" else -1
            stay.add(min(evaluated, key=lambda each: (sign * each.metrics[keep.best or ""], -each.step)).name)
    return [each.name for each in by_step if each.name not in stay]


class Problem(StrEnum):
    """Why a state must not become a checkpoint: storage has no part in it, and going on would be wrong."""

    DIFFERS = "differs"
    NOT_FINITE = "not finite"


class BadState(DureError):
    """A state that is not to be saved."""

    def __init__(self, words: str, problem: Problem) -> None:
        super().__init__(words)
        self.problem = problem


@dataclass(frozen=True)
class SaveResult:
    """How a save ended."""

    step: int
    name: str | None
    """None: nothing was saved."""
    trouble: str | None
    nbytes: int = 0
    seconds: float = 0.0
    problem: Problem | None = None
    """What is wrong with the state itself, if that is why."""


class CheckpointWriter:
    """Saves one checkpoint at a time. `group` is for the writing thread alone: one thread uses one group."""

    def __init__(
        self,
        store: Store,
        group: Group,
        keep: Retention,
        flush: Callable[[], None],
        done: Callable[[SaveResult], None],
        finite: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """`flush` is called before a checkpoint counts, `done` with how each save ended; both in the thread. `finite`
        says whether a tensor, by its name in the state, must hold finite numbers only."""
        self._store = store
        self._group = group
        self._keep = keep
        self._flush = flush
        self._done = done
        self._finite = finite
        self._snapshot = Snapshot()
        self._writing = Background("checkpoint")

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is still being written."""
        return self._writing.busy

    def buffer(self, state: State) -> torch.Tensor:
        """The memory that such a state's share is copied to."""
        return self._snapshot.buffer(state)

    def begin(self, state: State) -> float:
        """Copy this rank's share and start to write it; returns the seconds that the copy took. The replica must not be
        updated before the neighbour's share is hashed.

        All ranks begin together, and none may be busy.
        """
        assert not self.busy, "one checkpoint at a time"
        began = time.perf_counter()
        self._snapshot.take(state)
        copied = time.perf_counter() - began
        # What the thread holds must not keep the live tensors: they are the next step's.
        facts, table, neighbour = state.facts, state.table, state.neighbour

        def save() -> None:
            neighbours_hash = "" if neighbour is None else neighbour.take()
            self._done(self._save(facts, Manifest(facts, table, ()), neighbours_hash))

        self._writing.begin(save, copied)
        return copied

    def wait(self, alive: Callable[[], None] = lambda: None) -> bool:
        """Wait for the checkpoint under way, calling `alive` meanwhile; False when it takes too long."""
        deadline = time.monotonic() + WRITE_SECONDS
        while not self._writing.wait(0.2):
            alive()
            if time.monotonic() > deadline:
                return False
        return True

    def _save(self, facts: dict[str, Any], empty: Manifest, neighbours_hash: str) -> SaveResult:
        began = time.perf_counter()
        step = int(facts["step"])
        try:
            self._refuse_bad_state(step, neighbours_hash)
            name, nbytes = self._write(step, empty)
        except Exception as error:  # whatever it is, training goes on and the user is told
            words = str(error) if isinstance(error, DureError) else f"{type(error).__name__}: {error}"
            problem = error.problem if isinstance(error, BadState) else None
            return SaveResult(step, None, words, seconds=time.perf_counter() - began, problem=problem)
        return SaveResult(step, name, None, nbytes, time.perf_counter() - began)

    def _refuse_bad_state(self, step: int, neighbours_hash: str) -> None:
        """Raise BadState, on all ranks, where replicas differ or a number is not finite."""
        own = json.dumps([self._snapshot.shared(), neighbours_hash, self._snapshot.not_finite(self._finite)])
        told = [json.loads(text) for text in self._group.gather(own, "comparing shares of a checkpoint")]
        bad = next((name for _, _, name in told if name), None)
        if bad is not None:
            raise BadState(f"{bad} is not finite after step {step - 1}", Problem.NOT_FINITE)
        odd = disagreeing([shared for shared, _, _ in told], [seen for _, seen, _ in told])
        if len(told) > 1 and odd:
            raise BadState(
                f"the share of rank {odd[0]} is not what rank {(odd[0] - 1) % len(told)} has", Problem.DIFFERS
            )

    def _write(self, step: int, empty: Manifest) -> tuple[str, int]:
        group, store = self._group, self._store
        name = group.gather(f"{PREFIX}{step:09d}-{uuid.uuid4().hex[:6]}", "naming a checkpoint")[0]
        folder = f"{SAVING}{name}" if store.renames else name
        told = self._write_share(folder)
        everyones = [json.loads(text) for text in group.gather(json.dumps(told), "writing a checkpoint")]
        verdict = self._finish(name, folder, empty, everyones) if group.rank == 0 else ""
        verdict = group.gather(verdict, "finishing a checkpoint")[0]
        if verdict:
            raise StorageError(verdict)
        return name, sum(told["file"]["nbytes"] for told in everyones)

    def _write_share(self, folder: str) -> dict[str, Any]:
        part = f"part-{self._group.rank}-of-{self._group.size}.safetensors"
        try:
            file = self._snapshot.write(self._store, folder, part)
            self._flush()
        except Exception as error:  # the others must hear of it, or they would wait
            words = str(error) if isinstance(error, DureError) else f"{type(error).__name__}: {error}"
            return {"error": f"rank {self._group.rank}: {words}"}
        return {"file": asdict(file)}

    def _finish(self, name: str, folder: str, empty: Manifest, everyones: list[dict[str, Any]]) -> str:
        """Rank 0: make it a checkpoint, and let old ones go. Returns what went wrong."""
        store = self._store
        trouble = next((told["error"] for told in everyones if "error" in told), "")
        if not trouble:
            files = tuple(
                File(**{**told["file"], "pieces": tuple(map(tuple, told["file"]["pieces"]))})
                for told in everyones
            )
            manifest = Manifest(empty.facts, empty.table, files)
            try:
                check_files(store, folder, manifest)
                store.write_whole(f"{folder}/{MANIFEST}", [manifest.to_bytes()], only_if_absent=True)
                if store.renames:
                    store.rename_folder(folder, name)
            except DureError as error:
                trouble = str(error)
        if trouble:
            with contextlib.suppress(DureError):
                store.remove_tree(folder)
            return trouble
        with contextlib.suppress(DureError):  # what could not be removed now goes after the next save
            self._let_go(empty.facts)
        return ""

    def _let_go(self, facts: dict[str, Any]) -> None:
        """Remove checkpoints of this run that nobody asked to keep, and what killed runs left unfinished."""
        store, line = self._store, facts.get("line")
        remove_unfinished(store)
        own = [
            Saved(entry.name, entry.manifest.step, entry.manifest.facts.get("judged") or {})
            for entry in entries(store)
            if entry.trouble is None
            and entry.manifest is not None
            and entry.manifest.facts.get("line") == line
        ]
        for name in removable(own, self._keep):
            remove_checkpoint(store, name)
