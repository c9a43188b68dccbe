"""The whole examination: every node by itself, all of them side by side, every pair of them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from dure.doctor.checks import agreement
from dure.doctor.finding import Finding, bad, good
from dure.doctor.plan import Plan
from dure.doctor.reach import Line, Unreached
from dure.doctor.ways import Node
from dure.doctor.words import HEADINGS

_REACH_SECONDS = 30.0
_LOOK_SECONDS = 120.0
_CALL_SECONDS = 60.0
_LATE_SECONDS = 2.0
"""How long a file may take to show on another node."""

T = TypeVar("T")


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


def examine(plan: Plan, nodes: Sequence[Node]) -> Examination:
    """Examine these nodes."""
    names = tuple(node.name for node in nodes)
    token = uuid.uuid4().hex
    # Lines are closed before the pool, whose threads may wait for an answer: Ctrl-C does not.
    with ThreadPoolExecutor(len(nodes)) as pool, ExitStack() as open_lines:
        lines = {}
        for node in nodes:
            lines[node.name] = Line(node)
            open_lines.callback(lines[node.name].close)
        open_lines.callback(_hang_up, tuple(lines.values()))
        findings = _reach(lines, pool)
        lost = {finding.node for finding in findings}
        lines = {name: line for name, line in lines.items() if name not in lost}

        looks = _ask_all(
            lines, pool, findings, lambda name, line: _look(name, line, token, plan), _LOOK_SECONDS
        )
        lines = {name: line for name, line in lines.items() if name in looks}
        findings += [Finding.from_json(raw) for look in looks.values() for raw in look["findings"]]
        findings += _side_by_side(plan, looks)
        clocks = _ask_all(lines, pool, findings, lambda _, line: _skew(line), _REACH_SECONDS)
        pairs = []
        if plan.several:
            findings += agreement.clocks(clocks)
            findings += _storage_both_ways(lines, looks, pool, findings)
            pairs = _pairs(lines, looks, pool, findings)
        findings += agreement.connections(pairs, names)
    checks = list(HEADINGS["en"])
    findings.sort(key=lambda finding: (checks.index(finding.check), names.index(finding.node)))
    return Examination(names, tuple(findings), tuple(pairs))


def _hang_up(lines: Sequence[Line]) -> None:
    """All at once, so that none waits for another's end."""
    for line in lines:
        line.hang_up()


def _reach(lines: Mapping[str, Line], pool: ThreadPoolExecutor) -> list[Finding]:
    def wait(name: str) -> Finding | None:
        try:
            lines[name].wait_until_ready(_REACH_SECONDS)
        except Unreached as error:
            if lines[name].goes_in:
                return bad("image", name, "image.closed", reason=str(error))
            return _silent(lines[name], error)
        return None

    return [finding for finding in pool.map(wait, lines) if finding is not None]


def _ask_all(
    lines: Mapping[str, Line],
    pool: ThreadPoolExecutor,
    findings: list[Finding],
    ask: Callable[[str, Line], T],
    deadline_seconds: float,
) -> dict[str, T]:
    """What each node answers, asked at once; one that does not is a finding."""
    asked = {name: pool.submit(ask, name, line) for name, line in lines.items()}
    answers = {}
    for name, future in asked.items():
        try:
            answers[name] = future.result(deadline_seconds + _REACH_SECONDS)
        except Unreached as error:
            findings.append(_silent(lines[name], error))
    return answers


def _silent(line: Line, error: Unreached) -> Finding:
    return bad("reach", line.node.name, "reach.silent", reason=str(error), attempt=line.node.attempt)


def _look(name: str, line: Line, token: str, plan: Plan) -> dict[str, Any]:
    look: dict[str, Any] = line.ask("look", _LOOK_SECONDS, node=name, token=token, plan=plan.to_json())
    return look


def _skew(line: Line) -> tuple[float, float]:
    """How far the node's clock is from ours, and how sure that is: half the time that asking took."""
    before = time.time()
    there = float(line.ask("time", _REACH_SECONDS))
    after = time.time()
    return there - (before + after) / 2, (after - before) / 2


def _side_by_side(plan: Plan, looks: Mapping[str, dict[str, Any]]) -> list[Finding]:
    if not looks:
        return []
    findings = [good("reach", name, "reach.answers") for name in looks] if plan.several else []
    comparable = {name: look["versions"] for name, look in looks.items() if look["versions"] is not None}
    findings += agreement.same_versions(comparable)
    findings += agreement.same_cpu({name: look["cpu"] for name, look in looks.items()})
    if plan.files:
        findings += agreement.same_files({name: look["digests"] for name, look in looks.items()}, plan.files)
    return findings


def _storage_both_ways(
    lines: Mapping[str, Line],
    looks: Mapping[str, dict[str, Any]],
    pool: ThreadPoolExecutor,
    findings: list[Finding],
) -> list[Finding]:
    """Each node reads what the others wrote, wherever they did."""
    compared: list[Finding] = []
    for place in dict.fromkeys(place for look in looks.values() for place in look["wrote"]):
        wrote = [name for name, look in looks.items() if place in look["wrote"]]

        def ask(_: str, line: Line, place: str = place, wrote: Sequence[str] = wrote) -> list[str]:
            return list(line.ask("seen", _REACH_SECONDS, place=place, writers=wrote, seconds=_LATE_SECONDS))

        seen = _ask_all(lines, pool, findings, ask, _REACH_SECONDS)
        compared += agreement.seen_both_ways(seen, wrote) if seen else []
    blind = [finding for finding in compared if finding.level == "bad"]
    named = {finding.node for finding in blind}
    return blind + [
        good("both_ways", name, "both_ways.seen")
        for name in dict.fromkeys(finding.node for finding in compared if finding.node not in named)
    ]


def _pairs(
    lines: Mapping[str, Line],
    looks: Mapping[str, dict[str, Any]],
    pool: ThreadPoolExecutor,
    findings: list[Finding],
) -> list[dict[str, Any]]:
    """Every node calls every other. In each round every node calls one, and is called by one."""
    ready = [name for name in lines if looks[name]["address"] is not None]
    pairs: list[dict[str, Any]] = []
    for distance in range(1, len(ready)):
        called = {name: ready[(place + distance) % len(ready)] for place, name in enumerate(ready)}

        def call(name: str, line: Line, called: Mapping[str, str] = called) -> Sequence[dict[str, Any]]:
            look = looks[called[name]]
            results: Sequence[dict[str, Any]] = line.ask(
                "call", _CALL_SECONDS, address=look["address"], ports=look["ports"]
            )
            return results

        answers = _ask_all({name: lines[name] for name in ready}, pool, findings, call, _CALL_SECONDS)
        for name, results in answers.items():
            pairs += [{"from": name, "to": called[name], **result} for result in results]
    return pairs
