"""A run's checkpoints for people and for other programs: listed, and their weights exported as one safetensors file
with the model's own names."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dure.base.errors import CheckpointError, UsageError
from dure.base.files import write_whole
from dure.base.run_folder import RunFolder
from dure.base.say import printable
from dure.checkpoint.capture import not_persistent
from dure.checkpoint.find import entries, load
from dure.checkpoint.places import open_to_read
from dure.checkpoint.snapshot import header_of
from dure.checkpoint.state import AVERAGE, EXTRA, MODEL, Table, TensorSpan, WholeState
from dure.comm.group import Group
from dure.device.fingerprint import named_weights, raw_bytes


def as_rows(run: RunFolder, *, verify: bool) -> list[dict[str, Any]]:
    """One plain object per checkpoint, the newest first."""
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
    metrics = "".join(f"  {printable(name, 80)} {value:.4g}" for name, value in row["metrics"].items())
    size = f"{row['bytes'] / 1e6:,.1f} MB in {row['files']} file(s)"
    saved_at = printable(row["saved_at"] or "", 40)
    return f"{row['name']}  step {row['step']}  {saved_at}  {size}{metrics}  {verdict}"


def export_weights(
    run: RunFolder, out: Path, step: int | None = None, *, average: bool = False
) -> dict[str, Any]:
    """Write the newest checkpoint's weights, or those of `step`; returns what was written. `average`: the moving
    average of the weights instead, which a job with `train.ema` has.

    What the model's own `state_dict` leaves out is left out. A tied tensor is there once, under its first name, as
    safetensors and transformers have it.
    """
    store = open_to_read(run)
    whole = None
    for entry in entries(store):
        if entry.trouble is not None or entry.manifest is None or step not in (None, entry.manifest.step):
            continue
        try:
            whole = load(store, entry.name, entry.manifest, Group(None, 0, 1))
            break
        except CheckpointError as error:
            if step is not None:
                raise CheckpointError(f"{entry.name}: {error}") from None
    if whole is None:
        which = "that can be used" if step is None else f"of step {step}"
        raise UsageError(f"{store.location} has no checkpoint {which}; see `dure checkpoints {run.path}`")
    left_out = set(whole.facts["model"]["not_persistent"])
    prefix = f"{EXTRA}{AVERAGE}/module." if average else MODEL
    spans = [
        span
        for span in whole.table.spans
        if span.name.startswith(prefix) and span.name.removeprefix(prefix) not in left_out
    ]
    if average and not spans:
        raise UsageError(
            f"{run.path} has no moving average of its weights; it was not trained with train.ema"
        )
    spans.sort(key=lambda span: -span.dtype.itemsize)
    named = Table.of((span.name.removeprefix(prefix), span.dtype, span.shape) for span in spans)
    head = header_of([(span, 0, span.numel) for span in named.spans])
    try:
        write_whole(out.absolute(), _content(head, whole, spans))
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}") from None
    return {
        "file": str(out),
        "step": whole.facts["step"],
        "tensors": len(spans),
        "bytes": len(head) + sum(span.nbytes for span in spans),
        "ties": whole.facts["model"]["ties"],
    }


def export_module(module: torch.nn.Module, out: Path) -> None:
    """Write a live model's weights alone, as `export_weights` does."""
    left_out = set(not_persistent(module))
    weights = {name: tensor for name, tensor in named_weights(module) if name not in left_out}
    order = sorted(weights, key=lambda name: -weights[name].dtype.itemsize)
    named = Table.of((name, weights[name].dtype, tuple(weights[name].shape)) for name in order)
    head = header_of([(span, 0, span.numel) for span in named.spans])
    try:
        write_whole(out.absolute(), itertools.chain([head], (raw_bytes(weights[name]) for name in order)))
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}") from None


def _content(head: bytes, whole: WholeState, spans: list[TensorSpan]) -> Iterator[bytes | memoryview]:
    yield head
    for span in spans:
        yield raw_bytes(whole.elements(span.name))
