"""One rank's checkpoints of a run: go on from the newest state, keep states in memory, save them to storage, stop when
asked. `dure train` uses it; nothing in it needs a job file."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from dure.base.errors import CheckpointError, DureError, NotFinite, Resumable
from dure.base.say import printable
from dure.checkpoint.capture import Capture
from dure.checkpoint.find import refuse_other_recipe
from dure.checkpoint.memory_tier import MemoryTier, memory_tier
from dure.checkpoint.places import Places
from dure.checkpoint.rescue import Rescue
from dure.checkpoint.restore import restore
from dure.checkpoint.run_parts import Progress, Ranks, Replica, Reporting, RunInfo
from dure.checkpoint.snapshot import Background, make_present
from dure.checkpoint.state import EXTRA, MODEL, Share, Sharing, State, WholeState, is_not_finite
from dure.checkpoint.storage_tier import DIFFERS, STOP, StorageTier
from dure.checkpoint.writer import WRITE_SECONDS, Problem
from dure.comm.group import node_group
from dure.comm.raise_on_all import raise_on_all
from dure.config import Checkpoint
from dure.observe import events
from dure.observe.heartbeat import Phase

_RETRY_PAUSES_SECONDS = (1.0, 2.0, 4.0)
"""Before the last checkpoint is tried again, where it belongs; then it is saved elsewhere."""
_STUCK = "it is still being written"


class CheckpointManager:
    """One rank's part in keeping and saving states. All ranks call all methods, in step.

    For each step: hand `step_flags()` to the loss reduction, which ORs them across ranks, update within `updating()`,
    then call `save_if_due` with the OR-ed flags.
    """

    def __init__(
        self,
        settings: Checkpoint,
        places: Places,
        ranks: Ranks,
        replica: Replica,
        progress: Progress,
        run: RunInfo,
        reporting: Reporting,
    ) -> None:
        self._settings = settings
        self._places = places
        self._ranks = ranks
        self._replica = replica
        self._progress = progress
        self._run = run
        self._reporting = reporting
        module = replica.module
        named = [*module.named_parameters(), *module.named_buffers()]
        self._not_finite_at_start = {MODEL + name for name, tensor in named if is_not_finite(tensor.detach())}
        """A mask of minus infinities, say: what it begins with it may keep."""
        self._storage = self._storage_tier()
        self._memory = self._memory_tier()
        self._capture = Capture(module, replica.optimizer, replica.schedule, replica.extra)
        self._populating = Background("memory for states", gives_way=True)
        self._start = progress.steps_done
        self._resumed_from: int | None = None

    def resume(self) -> None:
        """Go on from the newest state in memory, else from the newest checkpoint, if there is one."""
        memory, storage, recorder = self._memory, self._storage, self._reporting.recorder
        kept = memory.newest() if memory is not None else None
        whole = self._newest_saved() if kept is None else kept.state
        if kept is not None:
            recorder.bring_in(kept.events)
            # On several nodes a part's rank had another number.
            if memory is not None and self._ranks.topology.nodes == 1:
                for rank, lines in memory.left_behind().items():
                    left = events.Recorder(self._places.run.events(rank))
                    left.bring_in(lines)
                    left.close()
            if storage is not None:
                storage.follow(str(kept.state.facts["line"]))
        if whole is not None:
            self._refuse_other_recipe(whole.facts)
            self._go_on_from(whole)
        if memory is not None:
            memory.begin(self._progress.steps_done)
        self._start = self._progress.steps_done

    def ask_to_stop(self) -> None:
        """From a signal's handler: save and stop after the current step."""
        if self._storage is not None:
            self._storage.ask_to_stop()

    def step_flags(self) -> int:
        """The flags of this rank for the next step."""
        differs = DIFFERS if self._memory is not None and self._memory.differs() else 0
        return differs | (self._storage.step_flags() if self._storage is not None else 0)

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Around an update. First waits until this rank has hashed its neighbour's share, as the replica is about to
        change. An update that fails in the first step after a resume is the fault of the state that was restored."""
        if self._memory is not None:
            self._memory.before_update()
        if self._storage is not None:
            self._storage.before_update()
        try:
            yield
        except DureError:
            raise
        except Exception as error:
            if self._progress.steps_done != self._resumed_from:
                raise
            words = printable(f"{type(error).__name__}: {error}", 200)
            raise CheckpointError(
                f"the optimizer cannot go on from the state of step {self._resumed_from}: {words}; start anew with "
                "--fresh or in another folder (nothing is deleted)"
            ) from error

    def save_if_due(self, flags: int) -> bool:
        """After a step with these OR-ed flags: keep the state in memory and save it, each when due. Returns whether a
        checkpoint was begun.

        Raises Resumable, with the state saved, when any rank was asked to stop, and what is wrong with a state that
        differs between ranks or is not finite.
        """
        if self._progress.steps_done == self._start + 1:
            # Not before the first step: an optimizer may have no state by then.
            self._populate_memory()
        if flags & DIFFERS:
            self._raise_problem()
        self._keep_if_due()
        storage = self._storage
        if storage is None:
            return False
        due = storage.due(flags, self._progress.steps_done, evaluated=self._progress.evaluated)
        if due:
            storage.save(self._state_to_save(), self._beat)
        if flags & STOP and (self._run.steps is None or self._progress.steps_done < self._run.steps):
            self._stop(storage)
        return due

    def begin_last(self) -> None:
        """Begin to save the end of the run, before it is evaluated."""
        storage = self._storage
        if storage is None:
            return
        storage.wait(self._beat)
        if not storage.is_saved(self._progress.steps_done):
            storage.save(self._state_to_save(), self._beat)

    def save_now(self) -> str:
        """Save the state as it is, and wait until it is saved; returns why it is not, "" when it is."""
        storage = self._storage
        if storage is None:
            return ""
        self._wait(storage)
        storage.save(self._state_to_save(), self._beat)
        self._wait(storage)
        return self._trouble(storage)

    def save_last(self) -> None:
        """Save the end of the run, with its evaluation where the best are kept, and wait until it is saved."""
        if self._memory is not None:
            self._memory.settle()
        storage = self._storage
        if storage is None:
            return
        self._wait(storage)
        best = storage.keeps_best and self._progress.evaluated
        trouble = self._trouble(storage)
        wanted = best or bool(trouble) or not storage.is_saved(self._progress.steps_done)
        for pause_seconds in (0.0, *_RETRY_PAUSES_SECONDS):
            if not wanted or trouble == _STUCK:
                break
            self._pause(pause_seconds)
            storage.save(self._state_to_save(), self._beat)
            self._wait(storage)
            trouble = self._trouble(storage)
            wanted = bool(trouble)
        if trouble:
            self._reporting.note(self._rescue().after_last_step(trouble))

    def _stop(self, storage: StorageTier) -> None:
        self._wait(storage)
        trouble = self._trouble(storage)
        told = "from there" if not trouble else self._rescue().after_stop(trouble)
        raise Resumable(
            f"stopped after step {self._progress.steps_done}{self._run.of_steps}, resumable: {self._places.again} goes "
            f"on {told}"
        )

    def _raise_problem(self) -> None:
        """A rank saw that a state's shares differ, or are not finite: find out what, and raise."""
        last = self._storage.last if self._storage is not None else None
        if last is not None and last.problem is Problem.NOT_FINITE:
            raise NotFinite(
                f"{last.trouble}: that state is not saved, and the run ends. The step's gradients were finite, so the "
                "update overflowed: try a smaller train.lr or train.clip_norm"
            )
        self._replica.verify(self._progress.steps_done - 1)
        if self._storage is not None:
            self._storage.forget_problem()
        self._reporting.note(
            f"a state kept before step {self._progress.steps_done} was not the same on all ranks; it is not used, and "
            "now all ranks are the same again"
        )

    def _populate_memory(self) -> None:
        """Have the kernel provide the memory for states beside the next step."""
        buffers: list[torch.Tensor] = []
        if self._memory is not None:
            buffers += self._memory.buffers(self._state_to_keep(self._memory.share))
            self._note_no_memory(self._memory)
        if self._storage is not None:
            buffers.append(self._storage.buffer(self._state()))
        self._populating.begin(lambda: make_present(buffers))

    def _keep_if_due(self) -> None:
        """Keep the state in memory that outlives this rank."""
        memory = self._memory
        if memory is None:
            return
        # A state counts a step later at the latest, so that a crash never costs more than the steps between two.
        memory.settle()
        if memory.is_due(self._progress.steps_done):
            recorder = self._reporting.recorder
            memory.keep(self._state_to_keep, self._progress.steps_done, recorder.unwritten())
            self._note_no_memory(memory)

    def _note_no_memory(self, memory: MemoryTier) -> None:
        if memory.trouble:
            self._reporting.note(f"no states are kept in memory: {memory.trouble}")

    def _trouble(self, storage: StorageTier) -> str:
        """Why the last checkpoint is not saved, as any rank knows it; "" when it is."""
        own = _STUCK if storage.busy else (storage.last.trouble or "" if storage.last else "")
        told = self._ranks.group.gather(own, "hearing of the last checkpoint")
        return next((trouble for trouble in told if trouble), "")

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._beat()
            time.sleep(0.1)

    def _wait(self, storage: StorageTier) -> None:
        """Wait for the checkpoint under way; all ranks then know how it ended."""
        storage.wait(self._beat)
        if storage.last is not None and storage.last.problem is not None:
            self._raise_problem()

    def _rescue(self) -> Rescue:
        return Rescue(
            self._places,
            self._ranks.topology,
            self._ranks.group,
            lambda share: self._capture.take(self._facts(), share, self._sharing_of_node()),
            self._must_be_finite,
            self._beat,
        )

    def _storage_tier(self) -> StorageTier | None:
        """None where nothing is to be saved, or where ranks have models of their own."""
        group, reporting = self._ranks.group, self._reporting
        if not self._settings.wanted or not self._ranks.sync:
            return None

        def make_folder() -> str:
            if self._ranks.topology.is_leader:
                self._places.open_to_write()
            return ""

        raise_on_all(group, "opening the storage of checkpoints", make_folder)
        storage = StorageTier(
            self._places.open_to_write(),
            self._settings,
            group,
            group.twin(WRITE_SECONDS),
            reporting.recorder,
            self._places.run.stop,
            lambda: reporting.heartbeat.beat(0, Phase.LOADING),
            self._must_be_finite,
        )
        # Slurm tells every process of a step, also those that the launcher would tell; it ends ranks by SIGKILL.
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, lambda number, frame: storage.ask_to_stop())
        return storage

    def _memory_tier(self) -> MemoryTier | None:
        every, topology = self._settings.memory_every, self._ranks.topology
        if every == 0 or not self._ranks.sync:
            return None
        steps = None if every == "auto" else every
        return memory_tier(
            os.environ, topology.local_rank, topology.local_size, self._ranks.group, steps, topology.node
        )

    def _newest_saved(self) -> WholeState | None:
        if self._storage is None:
            return None
        ranks, places = self._ranks, self._places
        topology = ranks.topology
        node = node_group(ranks.group, topology.node, topology.local_rank, ranks.device, WRITE_SECONDS)
        return self._storage.newest(
            node,
            lambda found: self._refuse_other_recipe(found.facts),
            places.rescued,
        )

    def _refuse_other_recipe(self, facts: Mapping[str, Any]) -> None:
        if not self._run.takes_any_recipe:
            refuse_other_recipe(facts, self._run.recipe, self._places.storage)

    def _go_on_from(self, whole: WholeState) -> None:
        replica, progress = self._replica, self._progress
        restore(whole, replica.module, replica.optimizer, replica.schedule, replica.sharing(), replica.extra)
        self._resumed_from = int(whole.facts["step"])
        progress.go_on_from(whole.facts)
        replica.verify(progress.steps_done - 1)
        self._reporting.note(f"goes on from step {progress.steps_done}{self._run.of_steps}")

    def _state_to_save(self) -> State:
        self._reporting.saving(self._progress.steps_done)
        return self._state()

    def _state(self) -> State:
        """This rank's share of a checkpoint."""
        self._beat()
        share = Share(self._ranks.topology.rank, self._ranks.topology.size)
        return self._capture.take(self._facts(), share, self._replica.sharing())

    def _state_to_keep(self, share: Share) -> State:
        """For memory. The launcher is the same, but not the code: a file may change between two starts of a team."""
        return self._capture.take(self._facts_of_state(), share, self._sharing_of_node())

    def _sharing_of_node(self) -> Sharing | None:
        """Of a sharded optimizer, where every node is to have all of it."""
        sharing = self._replica.sharing()
        return None if sharing is None else replace(sharing, node=0, nodes=1)

    def _facts_of_state(self) -> dict[str, Any]:
        return {
            "step": self._progress.steps_done,
            "line": self._storage.line if self._storage is not None else "",
            "recipe_words": self._run.recipe,
            **self._progress.to_facts(),
        }

    def _facts(self) -> dict[str, Any]:
        cursor = {}
        if self._run.steps_of_epoch is not None:
            epoch, step_of_epoch = divmod(self._progress.steps_done, self._run.steps_of_epoch)
            cursor = {"epoch": epoch, "step_of_epoch": step_of_epoch}
        return {
            **self._facts_of_state(),
            **self._run.facts,
            **cursor,
            "saved_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "ranks": self._ranks.topology.size,
            "judged": self._progress.metrics if self._progress.evaluated else {},
        }

    def _must_be_finite(self, name: str) -> bool:
        return name not in self._not_finite_at_start and not name.startswith(EXTRA)

    def _beat(self) -> None:
        self._reporting.heartbeat.beat(self._progress.steps_done, Phase.SAVE)
