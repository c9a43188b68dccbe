"""The storage tier: when a run saves, how its last save ended, and the newest state that was saved."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from dure.base.errors import DureError
from dure.checkpoint.find import newest_state
from dure.checkpoint.manifest import Manifest, remove_unfinished
from dure.checkpoint.state import LiveHash, State, WholeState
from dure.checkpoint.writer import CheckpointWriter, Retention, SaveResult
from dure.comm.group import Group
from dure.config import Checkpoint
from dure.observe import events
from dure.storage import Store

STOP, DUE, BUSY, DIFFERS = 1, 2, 4, 8
"""Step flags, OR-ed across ranks: stop after this step, save after it, do not save yet, compare replicas."""


class StorageTier:
    """When to save, how the last save ended, and the newest that was saved. Step flags are OR-ed across ranks in the
    loss reduction, so all ranks decide alike."""

    def __init__(
        self,
        store: Store,
        settings: Checkpoint,
        everyone: Group,
        writers: Group,
        recorder: events.Recorder,
        stop: Path,
        alive: Callable[[], None] = lambda: None,
        finite: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """`writers` are the same ranks with a longer timeout, and once saving begins for the writing thread alone.

        `stop` is there when the run shall stop; `alive` is called in long reads; `finite`: see `CheckpointWriter`.
        """
        self._store = store
        self._settings = settings
        self._everyone = everyone
        self._writers = writers
        self._alive = alive
        self._recorder = recorder
        self._stop = stop
        self._asked_to_stop = False
        self._pending = self._told = False
        self._saved_at = time.monotonic()
        self._begun_step = self._told_step = -1
        self._neighbour: LiveHash | None = None
        self.last: SaveResult | None = None
        """How the last save ended."""
        self.line = everyone.gather(_now(), "naming this run")[0]
        """When the run began that this one goes on with: `--fresh` begins another, and deletes nothing."""
        keep = Retention(settings.keep, settings.keep_every, settings.keep_best)
        self._writer = CheckpointWriter(store, writers, keep, recorder.flush, self._done, finite)

    def newest(
        self, node: Group, accepts: Callable[[Manifest], None], also: Sequence[str] = ()
    ) -> WholeState | None:
        """The newest state that is whole, on all ranks; None when there is none yet. `node` are this node's ranks,
        `also` other places in which it may be."""
        # A rank may have to read much more than another: with the timeout of a step, the others would give up.
        readers = self._writers if node.size == self._writers.size else node
        whole = newest_state(self._store, self._writers, readers, accepts, self.tell, self._alive, also)
        if whole is not None:
            self.line = str(whole.facts.get("line", ""))
            self._begun_step = -1 if whole.elsewhere else int(whole.facts["step"])
        self._clear_away()
        return whole

    def follow(self, line: str) -> None:
        """Go on with a run whose state was found elsewhere: nothing has to be read, and all saves are yet to come."""
        self.line = line
        self._clear_away()

    def _clear_away(self) -> None:
        if self._everyone.rank == 0:
            try:
                remove_unfinished(self._store)
            except DureError as error:
                self.tell(f"what a killed run left unfinished could not be removed: {error}")

    def ask_to_stop(self) -> None:
        """From a signal's handler: stop after the current step."""
        self._asked_to_stop = True

    def step_flags(self) -> int:
        """The flags of this rank for the step that begins."""
        late = time.monotonic() - self._saved_at >= (self._settings.every_seconds or float("inf"))
        return (
            (STOP if self._asked_to_stop or self._stop.exists() else 0)
            | (DUE if late and self._everyone.rank == 0 else 0)
            | (BUSY if self._writer.busy else 0)
            | (DIFFERS if self._has_problem() else 0)
        )

    def forget_problem(self) -> None:
        """All ranks have looked at what was wrong with the last state."""
        if self.last is not None:
            self.last = replace(self.last, problem=None)

    def _has_problem(self) -> bool:
        return self.last is not None and self.last.problem is not None

    def due(self, flags: int, step: int, *, evaluated: bool) -> bool:
        """Whether all ranks save now, after a step whose OR-ed flags are these. `evaluated`: after that very step."""
        settings = self._settings
        by_step = settings.every_steps and step % settings.every_steps == 0
        if evaluated and settings.keep_best is not None:
            return True  # the step's metrics are this state's: `save` waits for the checkpoint before it
        if by_step or flags & DUE:
            self._pending = True
        if flags & STOP:
            return self._begun_step != step
        if self._pending and flags & BUSY and not self._told:
            self._told = True
            self.tell(f"the checkpoint due after step {step} waits: the one before is still being written")
        return self._pending and not flags & BUSY

    def save(self, state: State, alive: Callable[[], None]) -> None:
        """Begin to save; waits only for a checkpoint that is still being written, which `due` avoids."""
        self._writer.wait(alive)
        self._pending = self._told = False
        self._saved_at = time.monotonic()
        self._begun_step = int(state.facts["step"])
        self._neighbour = state.neighbour
        self._writer.begin(state)

    def before_update(self) -> None:
        """Wait until the neighbour's share is hashed: the replica is about to change."""
        if self._neighbour is not None:
            self._neighbour.wait()
            self._neighbour = None

    def buffer(self, state: State) -> torch.Tensor:
        """The memory that such a state is copied to before it is written."""
        return self._writer.buffer(state)

    @property
    def keeps_best(self) -> bool:
        """Whether checkpoints are kept by their evaluation."""
        return self._settings.keep_best is not None

    def is_saved(self, step: int) -> bool:
        """Whether the state before this step is saved, or on its way."""
        failed = self.last is not None and self.last.step == step and self.last.trouble is not None
        return self._begun_step == step and not failed

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is still being written."""
        return self._writer.busy

    def wait(self, alive: Callable[[], None]) -> None:
        """Wait for the checkpoint under way."""
        if not self._writer.wait(alive):
            self.tell("a checkpoint is still being written after the longest wait; it is left behind")

    def tell(self, text: str) -> None:
        """Tell the user, once for all ranks."""
        if self._everyone.rank == 0:
            self._recorder.record(events.Noted(text))

    def _done(self, outcome: SaveResult) -> None:
        self.last = outcome
        if self._everyone.rank == 0:
            self._recorder.record(
                events.CheckpointSaved(
                    outcome.step, outcome.name, outcome.trouble, outcome.nbytes, round(outcome.seconds, 3)
                )
            )
        if outcome.trouble is not None and outcome.step != self._told_step:  # once, however often it is tried
            self._told_step = outcome.step
            self.tell(
                f"the checkpoint of step {outcome.step} could not be saved: {outcome.trouble}; what was saved before "
                "is still there"
            )


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
