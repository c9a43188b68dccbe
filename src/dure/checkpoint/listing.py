"""A run's checkpoints for people and for programs."""

from __future__ import annotations

from typing import Any

from dure.base.run_folder import RunFolder
from dure.base.say import printable
from dure.checkpoint.find import entries
from dure.checkpoint.where import open_to_read


def as_rows(run: RunFolder, *, verify: bool) -> list[dict[str, Any]]:
    """One plain object a checkpoint, the newest first."""
    rows = []
    for entry in entries(open_to_read(run), deep=verify):
        manifest = entry.manifest
        facts = manifest.facts if manifest is not None else {}
        rows.append(
            {
                "name": entry.name,
                "step": facts.get("step"),
                "epoch": facts.get("epoch"),
                "saved_at": facts.get("saved_at"),
                "bytes": manifest.nbytes if manifest is not None else None,
                "files": len(manifest.files) if manifest is not None else None,
                "metrics": facts.get("judged", {}),
                "verified": entry.trouble is None and verify,
                "trouble": entry.trouble,
            }
        )
    return rows


def in_words(rows: list[dict[str, Any]]) -> str:
    """A line each."""
    if not rows:
        return "no checkpoints yet"
    return "\n".join(_line(row) for row in rows)


def _line(row: dict[str, Any]) -> str:
    verdict = "verified" if row["verified"] else row["trouble"] or "not verified"
    if row["step"] is None:
        return f"{row['name']}  {verdict}"
    judged = "".join(f"  {printable(name, 80)} {value:.4g}" for name, value in row["metrics"].items())
    size = f"{row['bytes'] / 1e6:,.1f} MB in {row['files']} file(s)"
    saved_at = printable(row["saved_at"] or "", 40)
    return f"{row['name']}  step {row['step']}  {saved_at}  {size}{judged}  {verdict}"
