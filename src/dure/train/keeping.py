"""A run's states: kept in memory, saved to storage, and gone on from."""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from dure import __version__
from dure.base.errors import CheckpointError, DureError, NotFinite, Resumable
from dure.base.run_folder import RunFolder
from dure.base.say import printable
from dure.checkpoint.background import Background
from dure.checkpoint.capture import Capture
from dure.checkpoint.find import refuse_other_recipe
from dure.checkpoint.keeper import DIFFERS, STOP, Keeper
from dure.checkpoint.memory import MemoryTier, memory_tier
from dure.checkpoint.pages import make_present
from dure.checkpoint.restore import restore
from dure.checkpoint.save import WRITE_SECONDS, Problem
from dure.checkpoint.state import MODEL, Share, Sharing, State, WholeState
from dure.checkpoint.where import location, open_to_write, rescued_states
from dure.checkpoint.witness import is_not_finite
from dure.comm.group import node_group
from dure.comm.raise_on_all import raise_on_all
from dure.config import LoadedJob
from dure.data.ledger import SampleLedger
from dure.observe import events
from dure.observe.heartbeat import Phase
from dure.team import Team
from dure.train.elsewhere import Elsewhere

_RETRY_PAUSES_SECONDS = (1.0, 2.0, 4.0)
"""Before the last checkpoint is tried again, where it belongs; then it is saved elsewhere."""
_STUCK = "it is still being written"


@dataclass
class Reached:
    """How far a run has come: what changes with its steps, besides the model and the optimizer."""

    steps_done: int = 0
    loss: float = float("nan")
    metrics: dict[str, float] = field(default_factory=dict)
    judged_after: int = -1
    """`steps_done` at the last evaluation."""
    ledger: SampleLedger = field(default_factory=SampleLedger)
    """The samples that were used by then."""


@dataclass(frozen=True)
class Trained:
    """What the next step depends on, and the words that say for which run."""

    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler | None
    steps: int
    """Of the whole run."""
    steps_of_epoch: int
    recipe: str
    recipe_words: dict[str, Any]


class Keeping:
    """One rank's part in keeping and saving states. All ranks call all methods, in step."""

    def __init__(
        self,
        loaded: LoadedJob,
        folder: RunFolder,
        team: Team,
        recorder: events.Recorder,
        trained: Trained,
        at: Reached,
        note: Callable[[str], None],
    ) -> None:
        """`at` is changed when the run goes on from an earlier state; `note` tells the user something."""
        self.loaded = loaded
        self.folder = folder
        self.team = team
        self.recorder = recorder
        self.trained = trained
        self.at = at
        self._note = note
        module = trained.model.module
        named = [*module.named_parameters(), *module.named_buffers()]
        self._not_finite_at_start = {MODEL + name for name, tensor in named if is_not_finite(tensor.detach())}
        """A mask of minus infinities, say: what it begins with it may keep."""
        self.keeper = self._keeper()
        self.memory = self._memory_tier()
        self._capture = Capture(trained.model.module, trained.optimizer, trained.schedule)
        self._readying = Background("memory for states", gives_way=True)
        self._went_on_from: int | None = None

    def resume(self) -> None:
        """Go on from the newest state in memory, else from the newest checkpoint, if there is one."""
        kept = self.memory.newest() if self.memory is not None else None
        whole = self._newest_saved() if kept is None else kept.state
        if kept is not None:
            self.recorder.bring_in(kept.events)
            if (
                self.memory is not None and self.team.topology.nodes == 1
            ):  # elsewhere a part's rank had another number
                for rank, lines in self.memory.left_behind().items():
                    left = events.Recorder(self.folder.events(rank))
                    left.bring_in(lines)
                    left.close()
            if self.keeper is not None:
                self.keeper.follow(str(kept.state.facts["line"]))
        if whole is not None:
            refuse_other_recipe(whole.facts, self.trained.recipe_words, location(self.loaded, self.folder))
            self._go_on_from(whole)
        if self.memory is not None:
            self.memory.begin(self.at.steps_done)

    def step_flags(self) -> int:
        """What this rank asks for in the next step."""
        differs = DIFFERS if self.memory is not None and self.memory.differs() else 0
        return differs | (self.keeper.step_flags() if self.keeper is not None else 0)

    def before_update(self) -> None:
        """The replica is about to change: wait until this rank has hashed what it is the witness of."""
        if self.memory is not None:
            self.memory.before_update()
        if self.keeper is not None:
            self.keeper.before_update()

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Around an update: what an optimizer cannot do with a state that it was given shows in the first one."""
        try:
            yield
        except DureError:
            raise
        except Exception as error:
            if self.at.steps_done != self._went_on_from:
                raise
            words = printable(f"{type(error).__name__}: {error}", 200)
            raise CheckpointError(
                f"the optimizer cannot go on from the state of step {self._went_on_from}: {words}; start anew with "
                "--fresh (nothing is deleted)"
            ) from error

    def refuse_bad_states(self, flags: int) -> None:
        """When any rank saw that a state's parts differ, or are not finite: find out what, and raise."""
        if flags & DIFFERS:
            self._raise_problem()

    def _raise_problem(self) -> None:
        last = self.keeper.last if self.keeper is not None else None
        if last is not None and last.problem is Problem.NOT_FINITE:
            raise NotFinite(
                f"{last.trouble}: that state is not saved, and the run ends. The step's gradients were finite, so the "
                "update overflowed: try a smaller train.lr or train.clip_norm"
            )
        self.team.prove(self.trained.model, self.trained.optimizer, self.at.steps_done - 1)
        if self.keeper is not None:
            self.keeper.forget_problem()
        self._note(
            f"a state kept before step {self.at.steps_done} was not the same on all ranks; it is not used, and now "
            "all ranks are the same again"
        )

    def make_ready(self) -> None:
        """Have the memory for states provided beside the next step. After the first one: before it, an optimizer may
        have no state."""
        buffers: list[torch.Tensor] = []
        if self.memory is not None:
            buffers += self.memory.buffers(self._state_to_keep(self.memory.share))
            self._tell_trouble(self.memory)
        if self.keeper is not None:
            buffers.append(self.keeper.buffer(self._state()))
        self._readying.begin(lambda: make_present(buffers))

    def keep_if_due(self) -> None:
        """Keep the state in memory that outlives this rank."""
        if self.memory is None:
            return
        # A state counts a step later at the latest, so that a crash never costs more than the steps between two.
        self.memory.settle()
        if self.memory.is_due(self.at.steps_done):
            self.memory.keep(self._state_to_keep, self.at.steps_done, self.recorder.unwritten())
            self._tell_trouble(self.memory)

    def _tell_trouble(self, memory: MemoryTier) -> None:
        if memory.trouble:
            self._note(f"no states are kept in memory: {memory.trouble}")

    def save_if_due(self, flags: int) -> None:
        """Save when all ranks agree that it is time; when one was asked to stop, save and raise Resumable."""
        keeper = self.keeper
        if keeper is None:
            return
        if keeper.due(flags, self.at.steps_done, judged=self.at.judged_after == self.at.steps_done):
            keeper.save(self._state(), self._saving)
        if flags & STOP and self.at.steps_done < self.trained.steps:
            self._wait(keeper)
            trouble = self._trouble(keeper)
            told = "from there" if not trouble else self._elsewhere().after_stop(trouble)
            raise Resumable(
                f"stopped after step {self.at.steps_done} of {self.trained.steps}, resumable: the same command with "
                f"--run-dir {self.folder.path} goes on {told}"
            )

    def begin_last(self) -> None:
        """Begin to save the end of the run, before it is evaluated."""
        keeper = self.keeper
        if keeper is None:
            return
        keeper.wait(self._saving)
        if not keeper.is_saved(self.at.steps_done):
            keeper.save(self._state(), self._saving)

    def save_last(self) -> None:
        """Save the end of the run, with what it was judged as where the best are kept, and wait until it is there."""
        if self.memory is not None:
            self.memory.settle()
        keeper = self.keeper
        if keeper is None:
            return
        self._wait(keeper)
        best = keeper.keeps_best and self.at.judged_after == self.at.steps_done
        trouble = self._trouble(keeper)
        wanted = best or bool(trouble) or not keeper.is_saved(self.at.steps_done)
        for pause_seconds in (0.0, *_RETRY_PAUSES_SECONDS):
            if not wanted or trouble == _STUCK:
                break
            self._pause(pause_seconds)
            keeper.save(self._state(), self._saving)
            self._wait(keeper)
            trouble = self._trouble(keeper)
            wanted = bool(trouble)
        if trouble:
            self._note(self._elsewhere().after_last_step(trouble))

    def _elsewhere(self) -> Elsewhere:
        return Elsewhere(
            self.loaded,
            self.folder,
            self.team,
            lambda share: self._capture.take(self._facts(), share, self._sharing_of_node()),
            self._must_be_finite,
            self._saving,
        )

    def _trouble(self, keeper: Keeper) -> str:
        """Why the last checkpoint is not saved, as any rank knows it; "" when it is."""
        own = _STUCK if keeper.busy else (keeper.last.trouble or "" if keeper.last else "")
        told = self.team.group.gather(own, "hearing of the last checkpoint")
        return next((trouble for trouble in told if trouble), "")

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._saving()
            time.sleep(0.1)

    def _wait(self, keeper: Keeper) -> None:
        """Wait for the checkpoint under way; all ranks then know what came of it."""
        keeper.wait(self._saving)
        if keeper.last is not None and keeper.last.problem is not None:
            self._raise_problem()

    def _keeper(self) -> Keeper | None:
        """Who saves; nobody where nothing is to be saved, or where ranks have models of their own."""
        team, settings = self.team, self.loaded.job.checkpoint
        if not settings.wanted or not team.setting.sync:
            return None

        def make_it() -> str:
            if team.is_leader:
                open_to_write(self.loaded, self.folder)
            return ""

        raise_on_all(team.group, "opening the storage of checkpoints", make_it)
        keeper = Keeper(
            open_to_write(self.loaded, self.folder),
            settings,
            team.group,
            team.group.twin(WRITE_SECONDS),
            self.recorder,
            self.folder.stop,
            lambda: team.heartbeat.beat(0, Phase.LOADING),
            self._must_be_finite,
        )
        # Slurm tells every process of a step, also those that the launcher would tell; it ends ranks by SIGKILL.
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, lambda number, frame: keeper.ask_to_stop())
        return keeper

    def _memory_tier(self) -> MemoryTier | None:
        every, topology = self.loaded.job.checkpoint.memory_every, self.team.topology
        if every == 0 or not self.team.setting.sync:  # replicas that differ are no state
            return None
        steps = None if every == "auto" else every
        return memory_tier(
            os.environ, topology.local_rank, topology.local_size, self.team.group, steps, topology.node
        )

    def _newest_saved(self) -> WholeState | None:
        if self.keeper is None:
            return None
        team = self.team
        node = node_group(team.group, team.topology.node, team.topology.local_rank, team.setting.device)
        where = location(self.loaded, self.folder)
        return self.keeper.resume(
            node,
            lambda found: refuse_other_recipe(found.facts, self.trained.recipe_words, where),
            rescued_states(self.loaded, self.folder),
        )

    def _go_on_from(self, whole: WholeState) -> None:
        restore(
            whole,
            self.trained.model.module,
            self.trained.optimizer,
            self.trained.schedule,
            self.team.sharing(self.trained.optimizer),
        )
        facts = whole.facts
        self._went_on_from = int(facts["step"])
        loss = facts.get("loss")
        self.at.steps_done, self.at.loss = int(facts["step"]), math.nan if loss is None else float(loss)
        self.at.metrics = dict(facts.get("metrics", {}))
        self.at.judged_after = int(facts.get("judged_after", -1))
        self.at.ledger.go_on_from(facts.get("ledger"))
        self.team.prove(self.trained.model, self.trained.optimizer, self.at.steps_done - 1)
        self._note(f"goes on from step {self.at.steps_done} of {self.trained.steps}")

    def _state_to_keep(self, share: Share) -> State:
        """For memory. The launcher is the same, but not the code: a file may change between two starts of a team."""
        facts = {
            "step": self.at.steps_done,
            "line": self.keeper.line if self.keeper is not None else "",
            "recipe_words": self.trained.recipe_words,
            "loss": self.at.loss,
            "metrics": self.at.metrics,
            "judged_after": self.at.judged_after,
            "ledger": self.at.ledger.to_plain(),
        }
        return self._capture.take(facts, share, self._sharing_of_node())

    def _sharing_of_node(self) -> Sharing | None:
        """Of a sharded optimizer, where every node is to have all of it."""
        sharing = self.team.sharing(self.trained.optimizer)
        return None if sharing is None else replace(sharing, node=0, nodes=1)

    def _must_be_finite(self, name: str) -> bool:
        return name not in self._not_finite_at_start

    def _state(self) -> State:
        self._saving()
        share = Share(self.team.rank, self.team.topology.size)
        return self._capture.take(self._facts(), share, self.team.sharing(self.trained.optimizer))

    def _facts(self) -> dict[str, Any]:
        team, steps = self.team, self.trained.steps_of_epoch
        return {
            "step": self.at.steps_done,
            "epoch": self.at.steps_done // steps,
            "step_of_epoch": self.at.steps_done % steps,
            "line": self.keeper.line if self.keeper is not None else "",
            "saved_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "recipe": self.trained.recipe,
            "recipe_words": self.trained.recipe_words,
            "job": self.loaded.to_json(),
            "seed": team.setting.seed,
            "shards": team.setting.shards,
            "threads": team.threads,
            "ranks": team.topology.size,
            "loss": self.at.loss,
            "metrics": self.at.metrics,
            "judged_after": self.at.judged_after,
            "ledger": self.at.ledger.to_plain(),
            "judged": self.at.metrics if self.at.judged_after == self.at.steps_done else {},
            "versions": {"dure": __version__, "torch": torch.__version__},
        }

    def _saving(self) -> None:
        self.team.heartbeat.beat(self.at.steps_done, Phase.SAVE)
