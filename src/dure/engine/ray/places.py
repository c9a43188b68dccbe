"""Where a run's nodes are in Ray: one placement group of those that must be there, one more for each that may be."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from dure.base.errors import UsageError
from dure.base.say import say

_LOOK_SECONDS = 0.2
_NODE_ID = "ray.io/node-id"


@dataclass(frozen=True)
class Bundles:
    """What is asked of Ray."""

    name: str
    """Of the placement groups, for Ray's dashboard."""
    each: Mapping[str, float]
    """The resources of a node."""
    most: int
    fewest: int
    strategy: str
    wait_seconds: float


@dataclass(frozen=True)
class Place:
    """A node of Ray that a bundle is on."""

    group: PlacementGroup
    bundle: int
    node_id: str


@dataclass
class Places:
    """The bundles of a run, by the numbers of its nodes. A lost bundle is placed again by Ray itself."""

    bundles: Bundles
    _groups: list[PlacementGroup] = field(default_factory=list)
    _first: int = 0
    """Nodes in the first group; each further one is a group of its own."""

    def take(self, check: Callable[[], None]) -> None:
        """Ask for all bundles, and wait for those of the first group. `check` is called while it waits."""
        wanted = self.bundles
        fitting = sum(_fits(node["Resources"], wanted.each) for node in alive_nodes().values())
        self._first = min(wanted.most, max(wanted.fewest, fitting))
        strategy = wanted.strategy
        if strategy == "auto":
            strategy = "STRICT_SPREAD" if fitting >= self._first else "SPREAD"
        if strategy == "SPREAD" and self._first > 1:
            say(
                f"Ray has {fitting} nodes with {_in_words(wanted.each)}, and {self._first} are wanted: unless more "
                "come, some nodes of the run share one of Ray's"
            )
        self._groups.append(
            placement_group([dict(wanted.each)] * self._first, strategy=strategy, name=wanted.name)
        )
        deadline = time.monotonic() + wanted.wait_seconds
        told = False
        while len(self.now()) < self._first:
            check()
            if time.monotonic() > deadline:
                raise UsageError(
                    f"Ray had no place for {self._first} nodes with {_in_words(wanted.each)} each within "
                    f"{wanted.wait_seconds:.0f} s (ray.wait_seconds); it has {_what_there_is()}"
                )
            if not told and time.monotonic() > deadline - wanted.wait_seconds + 2.0:
                told = True
                say(
                    f"waits for {self._first} nodes with {_in_words(wanted.each)} each (up to "
                    f"{wanted.wait_seconds:.0f} s); Ray has {_what_there_is()}"
                )
            time.sleep(_LOOK_SECONDS)
        for _ in range(wanted.most - self._first):
            self._groups.append(self._another())

    def now(self) -> dict[int, Place]:
        """The nodes that have a place on a node that is alive."""
        alive = alive_nodes()
        found: dict[int, Place] = {}
        for at, group in enumerate(self._groups):
            table = placement_group_table(group)
            if table["state"] not in ("CREATED", "RESCHEDULING"):
                continue
            for bundle, node_id in table["bundles_to_node_id"].items():
                if node_id in alive:
                    found[bundle if at == 0 else self._first + at - 1] = Place(group, int(bundle), node_id)
        return found

    def give_back(self) -> None:
        """Remove all groups."""
        for group in self._groups:
            remove_placement_group(group)
        self._groups.clear()

    def _another(self) -> PlacementGroup:
        """A group of one bundle, on a node that no other of ours is on. It waits for one, as long as it takes."""
        used = sorted({place.node_id for place in self.now().values()})
        label = {_NODE_ID: f"!in({','.join(used)})"}
        group: PlacementGroup = placement_group(
            [dict(self.bundles.each)],
            strategy="STRICT_PACK",
            name=self.bundles.name,
            bundle_label_selector=[label],
        )
        return group


def alive_nodes() -> dict[str, dict[str, Any]]:
    """Ray's nodes by their ids, as `ray.nodes` has them."""
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}


def _fits(there: Mapping[str, float], wanted: Mapping[str, float]) -> bool:
    return all(there.get(name, 0.0) >= amount for name, amount in wanted.items())


def _in_words(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())


def _what_there_is() -> str:
    nodes = alive_nodes().values()
    shown = [_in_words({name: node["Resources"].get(name, 0.0) for name in ("CPU", "GPU")}) for node in nodes]
    return f"{len(shown)} node(s): {'; '.join(shown) or 'none'}"
