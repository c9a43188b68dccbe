"""When the last state cannot be saved where it belongs: have it saved elsewhere, and say how the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dure.base.errors import CheckpointError, Resumable
from dure.base.in_image import digest_inside
from dure.base.run_folder import RunFolder
from dure.checkpoint.find import location, rescue_folder, rescue_key
from dure.checkpoint.rescue import Rescued, RescueRanks, RescueTarget, rescue, temporary_places
from dure.checkpoint.state import Share, State
from dure.checkpoint.storage_tier import WRITE_SECONDS
from dure.comm.group import node_group
from dure.config import LoadedJob
from dure.team import Team


@dataclass(frozen=True)
class Elsewhere:
    """One rank's part in it. All ranks call all methods, in step."""

    loaded: LoadedJob
    folder: RunFolder
    team: Team
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
            f"{before}. The state itself is in {rescued.folder} on {rescued.host}: with --rescue-dir {rescued.folder} "
            "it goes on from there"
        )

    def after_last_step(self, trouble: str) -> str:
        """A note, when one node could save the state where it belongs. Else raises what the run ends with: Resumable
        when the very same command goes on from there, CheckpointError when somebody has to do something."""
        where = location(self.loaded, self.folder)
        told = f"all steps are done, but the last checkpoint could not be saved in {where}: {trouble}"
        try:
            rescued = self._save()
        except CheckpointError as error:
            raise CheckpointError(
                f"{told}; elsewhere: {error}. Make room, and run the same command again: it goes on from the "
                "checkpoint before; --rescue-dir DIR gives it another place"
            ) from None
        match rescued.kind:
            case "storage":
                return f"the last checkpoint was saved by {rescued.host} alone: {trouble}"
            case "rescue":
                raise Resumable(
                    f"{told}. It is in {rescued.folder}: the same command with --run-dir {self.folder.path} goes on "
                    "from there"
                )
            case "temporary":
                raise CheckpointError(
                    f"{told}. It is in {rescued.folder} on {rescued.host}: the same command with --run-dir "
                    f"{self.folder.path} --rescue-dir {rescued.folder} goes on from there"
                )

    def _save(self) -> Rescued:
        """Have one node save all of the state, in the first place that takes it."""
        team, topology = self.team, self.team.topology
        given = rescue_folder(self.loaded)
        targets = [RescueTarget("storage", location(self.loaded, self.folder))] if topology.nodes > 1 else []
        if given is not None:
            targets.append(RescueTarget("rescue", given))
        if digest_inside() is None:  # in an image, folders for temporary files are gone with it
            targets += temporary_places()
        node_ranks = node_group(team.group, topology.node, topology.local_rank, torch.device("cpu"))
        if node_ranks is team.group:
            node_ranks = team.group.twin(WRITE_SECONDS)
        savers = RescueRanks(team.group.twin(WRITE_SECONDS), node_ranks, topology.node, topology.nodes)
        share = Share(topology.local_rank, topology.local_size)
        return rescue(
            lambda: self.take(share), targets, rescue_key(self.folder), savers, self.finite, self.alive
        )
