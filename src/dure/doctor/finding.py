"""What a check found: a value that travels between nodes, and is put into words where somebody reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Level = Literal["ok", "bad", "info"]
"""`bad` fails the preflight; `info` is worth knowing and never fails."""


@dataclass(frozen=True)
class Finding:
    """One check on one node."""

    check: str
    """Which check; its heading is in `words.HEADINGS`."""
    node: str
    level: Level
    words: str
    """Which sentence says it, and how to put it right; a key of `sentences.SENTENCES`."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """What the sentence is filled with."""

    def to_json(self) -> dict[str, Any]:
        """The finding as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Finding:
        """The inverse of `to_json`."""
        return cls(**raw)


def good(check: str, node: str, words: str, **values: Any) -> Finding:
    """A check that passed."""
    return Finding(check, node, "ok", words, values)


def bad(check: str, node: str, words: str, **values: Any) -> Finding:
    """A check that failed."""
    return Finding(check, node, "bad", words, values)


def note(check: str, node: str, words: str, **values: Any) -> Finding:
    """Something worth knowing."""
    return Finding(check, node, "info", words, values)
