"""A state that its storage refuses, saved elsewhere before it is lost, and the words that say how the run goes on.

Every node holds all of the state, so one node is enough: each in turn tries each place, until one has it. The result is
an ordinary checkpoint, and a run that is given its place goes on from it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dure.base.errors import CheckpointError, DureError, Resumable
from dure.base.files import make_folders, make_own_folder
from dure.base.in_image import digest_inside
from dure.checkpoint.places import Places
from dure.checkpoint.snapshot import Background
from dure.checkpoint.state import Share, State
from dure.checkpoint.writer import WRITE_SECONDS, CheckpointWriter, Retention, SaveResult
from dure.comm.group import Group, node_group
from dure.comm.topology import Topology
from dure.device.accelerator import CPU
from dure.storage import open_store

Kind = Literal["storage", "rescue", "temporary"]


@dataclass(frozen=True)
class RescueTarget:
    """Where a state may go."""

    kind: Kind
    """The run's own storage, by one node alone; what the user gave; a folder for temporary files."""
    folder: str


@dataclass(frozen=True)
class Rescued:
    """Where a state was saved."""

    kind: Kind
    folder: str
    """What `--rescue-dir` has to be for a run to find it; for `storage`, nothing has to be said."""
    host: str


@dataclass(frozen=True)
class RescueRanks:
    """Who saves: all ranks, and those of this node."""

    everyone: Group
    """For the rescue alone, with the timeout of a long write."""
    node_ranks: Group
    node: int
    nodes: int


def temporary_places() -> list[RescueTarget]:
    """Folders for temporary files, the user's own choice first."""
    wanted = [os.environ.get("TMPDIR", ""), "/tmp", "/var/tmp"]
    return [RescueTarget("temporary", folder) for folder in dict.fromkeys(wanted) if os.path.isdir(folder)]


def rescue(
    take: Callable[[], State],
    targets: Sequence[RescueTarget],
    key: str,
    team: RescueRanks,
    finite: Callable[[str], bool],
    alive: Callable[[], None],
) -> Rescued:
    """Save the state in the first place that has room; CheckpointError with what each of them says. A collective call.

    `take` captures this rank's share of the state, cut among the ranks of its node. `key` tells runs apart in places
    that are not the run's own. `finite`: see `CheckpointWriter`. `alive` is called while it waits.
    """
    found: list[Rescued] = []
    work = Background("rescue")
    work.begin(lambda: found.append(_first_place(take, targets, key, team, finite)))
    deadline = time.monotonic() + WRITE_SECONDS * len(targets) * team.nodes
    while not work.wait(0.2):
        alive()
        if time.monotonic() > deadline:
            raise CheckpointError("it could not be saved elsewhere within the longest wait")
    return found[0]


def _first_place(
    take: Callable[[], State],
    targets: Sequence[RescueTarget],
    key: str,
    team: RescueRanks,
    finite: Callable[[str], bool],
) -> Rescued:
    troubles: list[str] = []
    for target in targets:
        for node in range(team.nodes):
            told = _tried(take, target, key, team.node_ranks, finite) if node == team.node else ""
            answers = [text for text in team.everyone.gather(told, "saving a state elsewhere") if text]
            answer = json.loads(answers[0])
            if "trouble" not in answer:
                return Rescued(target.kind, answer["folder"], answer["host"])
            troubles.append(answer["trouble"])
    raise CheckpointError("; ".join(dict.fromkeys(troubles)) or "there is no other place to try")


def _tried(
    take: Callable[[], State], target: RescueTarget, key: str, ranks: Group, finite: Callable[[str], bool]
) -> str:
    """What came of it, the same on all ranks of this node."""
    own = ""
    folder, trouble = target.folder, ""
    if ranks.rank == 0:
        try:
            if target.kind == "temporary":
                folder = own = tempfile.mkdtemp(
                    prefix="dure-rescue-", dir=target.folder
                )  # for this user alone
            if target.kind != "storage" and "://" not in folder:
                make_folders(Path(folder) / key)
                make_own_folder(Path(folder) / key)  # nobody else's, who may have known the name
        except OSError as error:
            trouble = f"{target.folder}: {error.strerror}"
    folder, trouble = json.loads(ranks.gather(json.dumps([folder, trouble]), "making room elsewhere")[0])
    outcomes: list[SaveResult] = []
    if not trouble:
        location = folder if target.kind == "storage" else f"{folder.rstrip('/')}/{key}"
        try:
            writer = CheckpointWriter(
                open_store(location), ranks, Retention(1), lambda: None, outcomes.append, finite
            )
            writer.begin(take())
            trouble = "" if writer.wait() else f"{location}: the write did not end"
        except DureError as error:
            trouble = str(error)
        trouble = trouble or outcomes[0].trouble or ""
    if trouble and own:
        with contextlib.suppress(OSError):
            shutil.rmtree(own)
    return json.dumps({"trouble": trouble} if trouble else {"folder": folder, "host": socket.gethostname()})


@dataclass(frozen=True)
class Rescue:
    """Has the last state saved elsewhere, and says how the run goes on. All ranks call all methods, in step."""

    places: Places
    topology: Topology
    group: Group
    """All ranks."""
    take: Callable[[Share], State]
    """Captures a share of the state, of those that the ranks of a node make up."""
    finite: Callable[[str], bool]
    """Whether a tensor, by its name in the state, must hold finite numbers only."""
    alive: Callable[[], None]
    """Called in waits."""

    def after_stop(self, trouble: str) -> str:
        """Where a run that was asked to stop goes on from."""
        before = f"from the checkpoint before, as this one could not be saved: {trouble}"
        try:
            rescued = self._save()
        except CheckpointError as error:
            return f"{before}; elsewhere: {error}"
        if rescued.kind != "temporary":
            return "from there"
        return (
            f"{before}. The state itself is in {rescued.folder} on {rescued.host}: with "
            f"{self.places.with_rescue(rescued.folder)} it goes on from there"
        )

    def after_last_step(self, trouble: str) -> str:
        """A note, when one node could save the state where it belongs. Else raises what the run ends with: Resumable
        when the very same command goes on from there, CheckpointError when somebody has to do something."""
        where = self.places.storage
        told = f"all steps are done, but the last checkpoint could not be saved in {where}: {trouble}"
        try:
            rescued = self._save()
        except CheckpointError as error:
            raise CheckpointError(
                f"{told}; elsewhere: {error}. Make room, and run the same command again: it goes on from the "
                f"checkpoint before; {self.places.with_rescue('DIR')} gives it another place"
            ) from None
        match rescued.kind:
            case "storage":
                return f"the last checkpoint was saved by {rescued.host} alone: {trouble}"
            case "rescue":
                raise Resumable(f"{told}. It is in {rescued.folder}: {self.places.again} goes on from there")
            case "temporary":
                way = f"{self.places.again} {self.places.with_rescue(rescued.folder)}"
                raise CheckpointError(
                    f"{told}. It is in {rescued.folder} on {rescued.host}: {way} goes on from there"
                )

    def _save(self) -> Rescued:
        """Have one node save all of the state, in the first place that takes it."""
        places, topology = self.places, self.topology
        targets = [RescueTarget("storage", places.storage)] if topology.nodes > 1 else []
        if places.rescue is not None:
            targets.append(RescueTarget("rescue", places.rescue))
        if digest_inside() is None:  # in an image, folders for temporary files are gone with it
            targets += temporary_places()
        node_ranks = node_group(self.group, topology.node, topology.local_rank, CPU, WRITE_SECONDS)
        if node_ranks is self.group:
            node_ranks = self.group.twin(WRITE_SECONDS)
        ranks = RescueRanks(self.group.twin(WRITE_SECONDS), node_ranks, topology.node, topology.nodes)
        share = Share(topology.local_rank, topology.local_size)
        return rescue(lambda: self.take(share), targets, places.rescue_key, ranks, self.finite, self.alive)
