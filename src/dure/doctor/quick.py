"""The part of the preflight that `dure train` does by itself: this node alone, in a fraction of a second."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from dure.base.errors import PreflightFailed
from dure.base.language import Language
from dure.config import LoadedJob
from dure.doctor.checks import storage
from dure.doctor.finding import Finding
from dure.doctor.node import local_findings
from dure.doctor.plan import needs_of
from dure.doctor.words import in_one_line

_CERTAIN = {"storage", "read_write", "space", "shm", "files", "interface"}
"""What stops a run for certain; all else is worth saying, and no reason to refuse."""


def quick_checks(
    loaded: LoadedJob, *, leader: str | None = None, run_folder: Path | None = None
) -> list[Finding]:
    """What this node finds by itself about a job that is about to start here. Imports no torch, takes no time.

    `leader`: the first node's name or address, where there are several nodes. `run_folder`: where the run will be.
    """
    node, token = socket.gethostname(), uuid.uuid4().hex
    plan = needs_of(
        loaded,
        hosts=() if leader is None else (leader, node),
        run_folder=run_folder,
        quick=True,
    )
    try:
        findings, _ = local_findings(plan, node, token)
    finally:
        storage.forget(plan, node, token)
    return [
        replace(found, level="info") if found.level == "bad" and found.check not in _CERTAIN else found
        for found in findings
    ]


def refuse_bad(findings: Iterable[Finding], language: Language = "en") -> None:
    """Raise PreflightFailed, in words, when a check failed."""
    failed = [finding for finding in findings if finding.level == "bad"]
    if failed:
        nodes = ", ".join(dict.fromkeys(finding.node for finding in failed))
        said = "; ".join(in_one_line(finding, language) for finding in failed)
        raise PreflightFailed(f"preflight failed on {nodes}: {said}")
