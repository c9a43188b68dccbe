"""What a self-test found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

SCHEMA = 1
"""Of `to_plain`; a change that readers must know of makes it larger."""
Verdict = Literal["pass", "fail", "skipped"]


@dataclass(frozen=True)
class Check:
    """One thing that was tried."""

    name: str
    verdict: Verdict
    why: str = ""
    """What is wrong, or why it was not tried; "" for a pass."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Plain values."""


@dataclass(frozen=True)
class Report:
    """All of it."""

    machine: dict[str, Any]
    """Host, devices, versions, driver, links."""
    checks: tuple[Check, ...]
    seconds: float

    @property
    def verdict(self) -> Verdict:
        """`fail` as soon as one check fails."""
        return "fail" if any(check.verdict == "fail" for check in self.checks) else "pass"

    def to_plain(self) -> dict[str, Any]:
        """For JSON; described in docs/selftest.md."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "seconds": round(self.seconds, 1),
            "machine": self.machine,
            "checks": [asdict(check) for check in self.checks],
        }
