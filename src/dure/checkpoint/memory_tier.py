"""The memory tier: a node's last two states, in memory that the launcher holds and its ranks fill.

It survives the death of any or all ranks, and costs one copy of 1/N of the state on each. A new team finds it,
agrees on the newest state that a node has whole and sound, brings it to those that have not, and goes on from there.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dure.base.errors import CheckpointError
from dure.checkpoint.memory_slot import Slot
from dure.checkpoint.snapshot import Background
from dure.checkpoint.state import LiveHash, Piece, Share, State, Table, WholeState
from dure.comm.group import Group
from dure.comm.topology import KEEP_VARIABLE

SHARE_OF_TIME = 0.01
"""Of a step's time, that keeping states may take."""
MOST_STEPS = 1_000
"""That a crash may cost, however expensive it is to keep a state."""
_FIRST_TOUCHES = 2
"""The first state in each slot also pays for fresh memory, once; that says nothing of the next ones."""
_CHUNK_BYTES = 16 << 20
_SHARE_OF_FREE_MEMORY = 0.5
_SIGN_SECONDS = 60.0


@dataclass(frozen=True)
class Costs:
    """What all ranks agree on: the slowest one's cost of keeping a state, and the fastest one's step."""

    state_seconds: float
    step_seconds: float


@dataclass(frozen=True)
class Cadence:
    """When the next state is kept: the same on every rank, as all know the same costs."""

    every: int | None
    """Steps between two; None: as many as stay under `SHARE_OF_TIME`."""
    due: int
    """The state before this step is to be kept."""
    steps: int = 1
    """Between this state and the one before."""
    kept: int = 0

    @classmethod
    def begin(cls, every: int | None, step: int) -> Cadence:
        """For a run that goes on with `step`."""
        return cls(every, step + (every or 1), every or 1)

    @property
    def asks(self) -> bool:
        """Whether ranks are to agree on the costs of the state that is due; not always, it takes an exchange."""
        return self.every is None and self.kept >= _FIRST_TOUCHES and (self.kept < 8 or self.kept % 16 == 0)

    def after(self, step: int, costs: Costs | None) -> Cadence:
        """What follows when a state was kept before `step`, at these costs, if ranks agreed on them."""
        steps = self.every or self.steps
        if self.every is None and costs is not None:
            fitting = costs.state_seconds / (SHARE_OF_TIME * max(costs.step_seconds, 1e-6))
            steps = max(1, math.ceil(min(fitting, MOST_STEPS)))
        return Cadence(self.every, step + steps, steps, self.kept + 1)


def spread(found: WholeState | None, giver: int, group: Group, *, wanted: bool) -> State | None:
    """What the rank `giver` has `found`, all of it, on every rank where it is `wanted`. A collective call."""
    what = "bringing a state to a node that has none"
    told = (
        json.dumps([found.facts, found.table.to_plain()]) if found is not None and group.rank == giver else ""
    )
    facts, spans = json.loads(group.gather(told, what)[giver])
    table = Table.from_plain(spans)
    gives = found is not None and group.rank == giver
    kept = torch.empty(table.nbytes, dtype=torch.uint8) if wanted else None
    passing = torch.empty(0 if gives or wanted else min(_CHUNK_BYTES, table.nbytes), dtype=torch.uint8)
    for start in range(0, table.nbytes, _CHUNK_BYTES):
        end = min(start + _CHUNK_BYTES, table.nbytes)
        if gives:
            assert found is not None
            chunk = found.memory[start:end]
        else:
            chunk = passing[: end - start] if kept is None else kept[start:end]
        group.from_rank(giver, chunk, what)
    return None if kept is None else _all_of(facts, table, kept)


def _all_of(facts: dict[str, Any], table: Table, memory: torch.Tensor) -> State:
    whole = WholeState(facts, table, memory)
    pieces = tuple(Piece(span, 0, span.numel, whole.elements(span.name)) for span in table.spans)
    return State(facts, table, pieces, pieces)


@dataclass(frozen=True)
class Found:
    """A state that an earlier team left in memory."""

    state: WholeState
    events: str
    """What this rank had recorded by then and might not have brought to the disk."""


class MemoryTier:
    """This rank's part in keeping states. All ranks call all methods, in step."""

    def __init__(
        self, slots: tuple[Slot, Slot], share: Share, group: Group, every: int | None, node: int = 0
    ) -> None:
        """`share`: of the ranks of this node; `group`: all ranks; `every`: see `Cadence`."""
        self.share = share
        self._node = node
        self.trouble = ""
        """Why no states are kept, if so."""
        self._slots = slots
        self._group = group
        self._cadence = Cadence.begin(every, 0)
        self._next_slot = 0
        self._kept_at: tuple[int, float] | None = None
        # A fingerprint takes half as long as the copy; the step need not wait for it.
        self._signing = Background("sign for a state")
        self._neighbour: LiveHash | None = None
        self._unchecked: Slot | None = None
        """The last state, until its parts were compared with the hashes that their neighbours took."""
        self._has_room = False

    def newest(self) -> Found | None:
        """The newest state that any node has whole and sound; other nodes are given it. None when there is none."""
        sound = [self._steps_found_sound(slot) for slot in self._slots]
        seen = [slot.shared() for slot in self._slots]
        told = [
            json.loads(text)
            for text in self._group.gather(json.dumps([self._node, sound, seen]), "finding states")
        ]
        of_nodes: dict[int, set[int]] = {}
        for node, steps, _ in told:
            of_nodes[node] = of_nodes.get(node, set(steps)) & set(steps) - {-1}
        step = max((step for steps in of_nodes.values() for step in steps), default=-1)
        if step >= 0 and _nodes_differ(step, told):
            # Which of them is right, nobody knows; the one before is.
            of_nodes = {node: steps - {step} for node, steps in of_nodes.items()}
            step = max((step for steps in of_nodes.values() for step in steps), default=-1)
        if step < 0:
            return None
        if not all(step in steps for steps in of_nodes.values()):
            giver = next(rank for rank, (node, _, _) in enumerate(told) if step in of_nodes[node])
            sound = self._share_out(step, giver, sound, wanted=step not in of_nodes[self._node])
        at = sound.index(step)
        self._next_slot = 1 - at
        slot = self._slots[at]
        records = slot.records() or []
        own = records[self.share.part] if len(records) == self.share.parts else None
        return Found(slot.state(records[0]), slot.events(own) if own is not None else "")

    def left_behind(self) -> dict[int, str]:
        """Of the state that `newest` found, when a team of another size kept it: what ranks of that team, by number,
        had recorded and might not have brought to the disk. Each rank of this team sees to some of them."""
        slot = self._slots[1 - self._next_slot]
        records = slot.records() or []
        if len(records) == self.share.parts:
            return {}  # each finds its own
        return {record.part: slot.events(record) for record in records[self.share.part :: self.share.parts]}

    def begin(self, step: int) -> None:
        """The run goes on with `step`: count from here."""
        self._cadence = Cadence.begin(self._cadence.every, step)
        self._kept_at = (step, time.perf_counter())

    def is_due(self, step: int) -> bool:
        """Whether the state before `step` is to be kept."""
        return not self.trouble and step >= self._cadence.due

    def keep(self, capture: Callable[[Share], State], step: int, events: Callable[[], str]) -> None:
        """Keep the state before `step`; `events` gives, in another thread, this rank's that might not be on disk yet.
        `before_update` must be called before the replica changes."""
        began = time.perf_counter()
        state = capture(self.share)
        if not self._have_room(state):
            return
        # The one before must be whole first: this one goes into the slot of the one before that.
        self.settle()
        signing_seconds = self._signing.cpu_seconds  # the last one's
        slot = self._slots[self._next_slot]
        sign = slot.fill(state, self.share.part, self.share.parts)
        neighbour = state.neighbour
        self._neighbour, self._unchecked = neighbour, slot
        self._next_slot = 1 - self._next_slot
        copying_seconds = time.perf_counter() - began
        self._signing.begin(
            lambda: sign("" if neighbour is None else neighbour.take(), events()), copying_seconds
        )
        # Where ranks outnumber the cores, the steps after wait for the signing of all of them.
        crowd = max(1.0, self.share.parts / len(os.sched_getaffinity(0)))
        spent = copying_seconds + signing_seconds * crowd
        costs = self._agree_on_costs(spent, began, step) if self._cadence.asks else None
        self._cadence = self._cadence.after(step, costs)
        self._kept_at = (step, time.perf_counter())

    def before_update(self) -> None:
        """Wait until the neighbour's share is hashed: the replica is about to change."""
        if self._neighbour is not None:
            self._neighbour.wait()
            self._neighbour = None

    def differs(self) -> bool:
        """Whether a part of the last state is not what the rank before has; compared once all have signed."""
        slot = self._unchecked
        if slot is None or self._signing.busy or slot.records() is None:
            return False
        self._unchecked = None
        return not slot.shared()

    def buffers(self, state: State) -> list[torch.Tensor]:
        """The memory that this rank's states will be copied to, if there is room for them."""
        if not self._have_room(state):
            return []
        return [buffer for slot in self._slots for buffer in slot.buffers(state, self.share.parts)]

    def settle(self) -> None:
        """Wait until this rank has signed for the state that it kept last: only then it counts."""
        if not self._signing.wait(_SIGN_SECONDS):
            raise CheckpointError(f"a state in memory was not signed for within {_SIGN_SECONDS:.0f} s")

    @property
    def held_bytes(self) -> int:
        """Memory that this node's states take."""
        return sum(slot.held_bytes for slot in self._slots)

    @property
    def every(self) -> int:
        """Steps between two states, as it is now."""
        return self._cadence.steps

    def close(self) -> None:
        """Let go of the slots; the launcher keeps them."""
        self.settle()
        for slot in self._slots:
            slot.close()

    def _share_out(self, step: int, giver: int, sound: list[int], *, wanted: bool) -> list[int]:
        """Bring the state that one node has to those that want it, and say again what is in this one's slots."""
        found = None
        if self._group.rank == giver:
            slot = self._slots[sound.index(step)]
            records = slot.records() or []
            found = slot.state(records[0])
        state = spread(found, giver, self._group, wanted=wanted and self.share.part == 0)
        if state is not None:
            self._slots[0].write(state, 0, 1, "")
        self._group.gather("", "keeping a state that another node had")
        return [self._steps_found_sound(slot) for slot in self._slots] if wanted else sound

    def _steps_found_sound(self, slot: Slot) -> int:
        """The step of the state in a slot, -1 when there is none; each rank checks its share of the bytes."""
        records = slot.records()
        if records is None:
            return -1
        share = records[self.share.part :: self.share.parts]
        try:
            sound = all(slot.sound(record) for record in share)
            slot.state(records[0])
        except (CheckpointError, ValueError):
            return -1
        return records[0].step if sound and slot.shared() else -1

    def _have_room(self, state: State) -> bool:
        """Agree on whether two states fit beside everything else."""
        if self._has_room or self.trouble:
            return self._has_room
        # What an earlier team held is ours already.
        needed, free = 2 * state.table.nbytes - self.held_bytes, free_memory_bytes()
        trouble = ""
        if needed > free * _SHARE_OF_FREE_MEMORY:
            trouble = f"two states need {needed / 2**20:.0f} MiB, and only {free / 2**20:.0f} MiB of memory are free"
        everyones = self._group.gather(trouble, "making room for states")
        self.trouble = next((told for told in everyones if told), "")
        self._has_room = not self.trouble
        return self._has_room

    def _agree_on_costs(self, state_seconds: float, began: float, step: int) -> Costs:
        since, at = self._kept_at or (step - 1, began)
        step_seconds = (began - at) / max(step - since, 1)
        worst = torch.tensor([state_seconds, -step_seconds], dtype=torch.float64)
        self._group.extreme(worst, "agreeing on how often to keep states", largest=True)
        return Costs(float(worst[0]), -float(worst[1]))


def memory_tier(
    environ: Mapping[str, str],
    local_rank: int,
    local_size: int,
    group: Group,
    every: int | None,
    node: int = 0,
) -> MemoryTier | None:
    """The tier that this node's launcher offers; None without one, on all ranks alike."""
    offered = environ.get(KEEP_VARIABLE, "")
    slots: list[Slot] = []
    trouble = "" if offered else "no launcher of ours"
    if offered:
        launcher, *descriptors = offered.split(":")
        try:
            slots = [Slot(f"/proc/{launcher}/fd/{descriptor}") for descriptor in descriptors]
        except OSError as error:  # another user's launcher, or a container without its /proc
            trouble = str(error)
    if any(group.gather(trouble, "finding the memory tier")):
        for slot in slots:
            slot.close()
        return None
    first, second = slots
    return MemoryTier((first, second), Share(local_rank, local_size), group, every, node)


def _nodes_differ(step: int, told: list[Any]) -> bool:
    """Whether nodes that cut the state of a step alike hold other bits of it."""
    seen = {
        tuple(shared)
        for _, steps, by_slot in told
        for of_slot, shared in zip(steps, by_slot, strict=True)
        if of_slot == step and shared
    }
    lengths = [len(shared) for shared in seen]
    return len(set(lengths)) < len(lengths)


def free_memory_bytes() -> int:
    """What this machine, or the control group that we are in, can still give."""
    free = 1 << 62
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        return min(free, limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # no limit, or no control groups
        return free
