"""What only shows when nodes are held side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dure.doctor.finding import Finding, bad, good, note


def common(values: Mapping[str, str | None]) -> str | None:
    """What most nodes have; among equals the first node's, which leads."""
    counted = Counter(values.values())
    most = max(counted.values())
    return next(value for value in values.values() if counted[value] == most)


def same_versions(versions: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """Every node has the versions that most have."""
    names = list(dict.fromkeys(name for of_node in versions.values() for name in of_node))
    usual = {name: common({node: of_node.get(name) for node, of_node in versions.items()}) for name in names}
    findings = []
    for node, of_node in versions.items():
        others = [name for name in names if of_node.get(name) != usual[name]]
        shown = " · ".join(f"{name} {version}" for name, version in of_node.items())
        if "missing" in of_node.values():
            findings.append(bad("versions", node, "versions.missing", versions=shown))
        elif others:
            here = ", ".join(f"{name} {of_node.get(name)}" for name in others)
            there = ", ".join(f"{name} {usual[name]}" for name in others)
            findings.append(bad("versions", node, "versions.differ", here=here, there=there))
        else:
            findings.append(good("versions", node, "versions.same", versions=shown))
    return findings


def same_cpu(kinds: Mapping[str, str]) -> list[Finding]:
    """Every node computes with the same instructions: others give other bits, and are refused at the start."""
    usual = common(kinds)
    return [
        good("cpu", node, "cpu.same", kind=kind)
        if kind == usual
        else bad("cpu", node, "cpu.differ", kind=kind, usual=usual)
        for node, kind in kinds.items()
    ]


def same_files(digests: Mapping[str, Mapping[str, str | None]], files: Mapping[str, str]) -> list[Finding]:
    """Every node has the bytes that most have of each file."""
    usual = {
        label: common(
            {node: of_node[label] for node, of_node in digests.items() if of_node[label]} or {"": None}
        )
        for label in files
    }
    findings = []
    for node, of_node in digests.items():
        missing = [f"{label} ({files[label]})" for label, digest in of_node.items() if digest is None]
        others = [
            f"{label} ({files[label]})"
            for label, digest in of_node.items()
            if digest and digest != usual[label]
        ]
        if missing:
            findings.append(bad("digests", node, "digests.missing", files=", ".join(missing)))
        if others:
            findings.append(bad("digests", node, "digests.differ", files=", ".join(others)))
        if not missing and not others:
            shown = ", ".join(f"{label} {digest[:8]}" for label, digest in of_node.items() if digest)
            findings.append(good("digests", node, "digests.same", files=shown))
    return findings


def seen_both_ways(seen: Mapping[str, Sequence[str]], writers: Sequence[str]) -> list[Finding]:
    """Every node reads what every other wrote. A node that shares nothing with the first one is the odd one."""
    first = next(iter(seen))
    apart = [
        node for node, others in seen.items() if first in writers and node != first and first not in others
    ]
    findings = []
    for node, others in seen.items():
        missing = [writer for writer in writers if writer not in others]
        if node == first:
            missing = [writer for writer in missing if writer not in apart]
        if missing:
            findings.append(bad("both_ways", node, "both_ways.blind", writers=", ".join(missing)))
        elif writers:
            findings.append(good("both_ways", node, "both_ways.seen"))
    return findings


def clocks(skews: Mapping[str, tuple[float, float]]) -> list[Finding]:
    """How far each clock is from ours. Nothing depends on it: no times are compared between nodes."""
    return [
        note("clock", node, "clock.skew", seconds=skew, within=within)
        for node, (skew, within) in skews.items()
    ]


def connections(measured: Sequence[Mapping[str, Any]], nodes: Sequence[str]) -> list[Finding]:
    """Every pair connects. A failed pair is laid on the node that is in most of them, then on the one that was called.

    `measured`: from, to, and either seconds and bytes a second, or the port and reason of the failure.
    """
    failed = [pair for pair in measured if "reason" in pair]
    findings: dict[str, Finding] = {}
    while failed:
        called = Counter(str(pair["to"]) for pair in failed)
        involved = Counter(called)
        involved.update(str(pair["from"]) for pair in failed)
        worst = max(nodes, key=lambda node: (involved[node], called[node], nodes.index(node)))
        mine = [pair for pair in failed if worst in (pair["from"], pair["to"])]
        said = "; ".join(
            f"{pair['from']} → {pair['to']} port {pair['port']}: {pair['reason']}" for pair in mine
        )
        findings[worst] = bad("network", worst, "network.cut", pairs=said)
        failed = [pair for pair in failed if pair not in mine]
    for node in nodes:
        mine = [pair for pair in measured if node in (pair["from"], pair["to"]) and "reason" not in pair]
        if node not in findings and mine:
            slowest = min(float(pair["bytes_per_second"]) for pair in mine)
            longest = max(float(pair["seconds"]) for pair in mine)
            findings[node] = good("network", node, "network.joined", rate=slowest, seconds=longest)
    return [findings[node] for node in nodes if node in findings]
