"""The whole examination: every node by itself, all of them side by side, every pair of them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

from dure.doctor.checks import agreement
from dure.doctor.finding import Finding, bad, good
from dure.doctor.plan import JobNeeds
from dure.doctor.reach import Failed, Node, NodeChannel, Unreached
from dure.doctor.words import HEADINGS

_REACH_SECONDS = 60.0
_ENTER_SECONDS = 300.0
"""On a node that cannot mount an image, it is unpacked first."""
_LOOK_SECONDS = 120.0
_CALL_SECONDS = 60.0
_LATE_SECONDS = 2.0
"""How long a file may take to show on another node."""

T = TypeVar("T")
Look = dict[str, Any]
"""What a node found by itself, as `NodePart.look` tells it."""


@dataclass(frozen=True)
class Examination:
    """All that was found."""

    nodes: tuple[str, ...]
    findings: tuple[Finding, ...]
    pairs: tuple[dict[str, Any], ...]
    """Each pair of nodes: from, to, seconds of a round trip, bytes a second; or the port and the reason."""

    @property
    def bad_nodes(self) -> tuple[str, ...]:
        """The nodes on which something failed, in order."""
        failing = {finding.node for finding in self.findings if finding.level == "bad"}
        return tuple(node for node in self.nodes if node in failing)


def examine(plan: JobNeeds, nodes: Sequence[Node]) -> Examination:
    """Examine these nodes."""
    names = tuple(node.name for node in nodes)
    token = uuid.uuid4().hex
    pairs: list[dict[str, Any]] = []
    with _Conversation(nodes) as team:
        team.each(lambda _, line: line.wait_until_ready(_REACH_SECONDS, _ENTER_SECONDS))
        looks: dict[str, Look] = team.each(
            lambda name, line: line.ask("look", _LOOK_SECONDS, node=name, token=token, plan=plan.to_json())
        )
        findings = [Finding.from_json(raw) for look in looks.values() for raw in look["findings"]]
        findings += _side_by_side(plan, looks)
        if plan.several:
            findings += agreement.clocks(team.each(lambda _, line: _skew(line)))
            findings += _storage_both_ways(team, looks)
            pairs = _pairs(team, looks)
        findings += agreement.connections(pairs, names)
    findings += team.lost
    checks = list(HEADINGS["en"])
    findings.sort(key=lambda finding: (checks.index(finding.check), names.index(finding.node)))
    return Examination(names, tuple(findings), tuple(pairs))


class _Conversation:
    """Lines to all nodes, from `with` to the end of its block; those that fall silent are let go of."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.lost: list[Finding] = []
        """What became of those that are not heard of any more."""
        self._nodes = nodes
        self._lines: dict[str, NodeChannel] = {}
        self._opened: list[NodeChannel] = []
        self._pool = ThreadPoolExecutor(len(nodes))

    def __enter__(self) -> Self:
        try:
            for node in self._nodes:
                self._opened.append(NodeChannel(node))
        except BaseException:
            self._end()
            raise
        self._lines = {line.node.name: line for line in self._opened}
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def each(
        self, ask: Callable[[str, NodeChannel], T], among: Collection[str] | None = None
    ) -> dict[str, T]:
        """What each node answers, all asked at once; one that does not is lost."""
        asked = {
            name: self._pool.submit(ask, name, line)
            for name, line in self._lines.items()
            if among is None or name in among
        }
        answers = {}
        for name, future in asked.items():
            try:
                answers[name] = future.result()
            except Unreached as error:
                # A late answer would be taken for that to the next question.
                self.lost.append(_lost(self._lines.pop(name), error))
        return answers

    def _end(self) -> None:
        for line in self._opened:  # all at once, so that none waits for another's end
            line.hang_up()
        for line in self._opened:
            line.close()
        # After the lines: its threads may wait for an answer, and Ctrl-C does not.
        self._pool.shutdown()


def _lost(line: NodeChannel, error: Unreached) -> Finding:
    name = line.node.name
    if isinstance(error, Failed):
        return bad("reach", name, "reach.failed", reason=str(error))
    if line.entering_image:
        return bad("image", name, "image.closed", reason=str(error))
    return bad("reach", name, "reach.silent", reason=str(error), attempt=line.node.attempt)


def _skew(line: NodeChannel) -> tuple[float, float]:
    """How far the node's clock is from ours, and how sure that is: half the time that asking took."""
    before = time.time()
    there = float(line.ask("time", _REACH_SECONDS))
    after = time.time()
    return there - (before + after) / 2, (after - before) / 2


def _side_by_side(plan: JobNeeds, looks: Mapping[str, Look]) -> list[Finding]:
    if not looks:
        return []
    findings = [good("reach", name, "reach.answers") for name in looks] if plan.several else []
    comparable = {name: look["versions"] for name, look in looks.items() if look["versions"] is not None}
    findings += agreement.same_versions(comparable)
    findings += agreement.same_cpu({name: look["cpu"] for name, look in looks.items()})
    if plan.files:
        findings += agreement.same_files({name: look["digests"] for name, look in looks.items()}, plan.files)
    return findings


def _storage_both_ways(team: _Conversation, looks: Mapping[str, Look]) -> list[Finding]:
    """Each node reads what the others wrote, wherever they did."""
    compared: list[Finding] = []
    for place in dict.fromkeys(place for look in looks.values() for place in look["wrote"]):
        wrote = [name for name, look in looks.items() if place in look["wrote"]]
        values = {"place": place, "writers": wrote, "seconds": _LATE_SECONDS}
        seen = team.each(partial(_ask_for, "seen", values))
        compared += agreement.seen_both_ways(seen, wrote) if seen else []
    blind = [finding for finding in compared if finding.level == "bad"]
    named = {finding.node for finding in blind}
    return blind + [
        good("both_ways", name, "both_ways.seen")
        for name in dict.fromkeys(finding.node for finding in compared if finding.node not in named)
    ]


def _ask_for(question: str, values: Mapping[str, Any], _: str, line: NodeChannel) -> Any:
    return line.ask(question, _REACH_SECONDS, **values)


def _pairs(team: _Conversation, looks: Mapping[str, Look]) -> list[dict[str, Any]]:
    """Every node calls every other. In each round every node calls one, and is called by one."""
    ready = [name for name, look in looks.items() if look["address"] is not None]
    pairs: list[dict[str, Any]] = []
    for distance in range(1, len(ready)):
        called = {name: ready[(place + distance) % len(ready)] for place, name in enumerate(ready)}
        answers = team.each(partial(_call, looks, called), among=ready)
        for name, results in answers.items():
            pairs += [{"from": name, "to": called[name], **result} for result in results]
    return pairs


def _call(
    looks: Mapping[str, Look], called: Mapping[str, str], name: str, line: NodeChannel
) -> list[dict[str, Any]]:
    look = looks[called[name]]
    return list(line.ask("call", _CALL_SECONDS, address=look["address"], ports=look["ports"]))
