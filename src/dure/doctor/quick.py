"""The part of the preflight that `dure train` does by itself: this node alone, in a fraction of a second."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

from dure.doctor.checks import storage
from dure.doctor.finding import Finding
from dure.doctor.node import local_findings
from dure.doctor.plan import plan_of
from dure.doctor.words import in_one_line
from dure.errors import PreflightFailed
from dure.job import LoadedJob
from dure.language import Language


def quick_checks(
    loaded: LoadedJob, *, hosts: Sequence[str] = (), writable: Path | None = None
) -> list[Finding]:
    """What this node finds by itself about a job that is about to start here. Imports no torch.

    `hosts`: the nodes, the leader first, where there are several and they are known. `writable`: the folder that the
    run will write to, where it is not the default.
    """
    plan = plan_of(loaded, hosts=hosts, quick=True)
    if writable is not None:
        plan = type(plan).from_json({**plan.to_json(), "writable": str(writable)})
    node, token = socket.gethostname(), uuid.uuid4().hex
    try:
        findings, _ = local_findings(plan, node, token)
    finally:
        storage.forget(plan, node, token)
    return findings


def refuse_bad(findings: Iterable[Finding], language: Language = "en") -> None:
    """Raise PreflightFailed, in words, when a check failed."""
    failed = [finding for finding in findings if finding.level == "bad"]
    if failed:
        nodes = ", ".join(dict.fromkeys(finding.node for finding in failed))
        said = "; ".join(in_one_line(finding, language) for finding in failed)
        raise PreflightFailed(f"preflight failed on {nodes}: {said}")
