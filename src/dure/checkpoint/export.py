"""The weights of a checkpoint alone, as one plain safetensors file with the model's own names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dure.base.errors import CheckpointError, UsageError
from dure.base.files import write_whole
from dure.base.run_folder import RunFolder
from dure.checkpoint.find import entries
from dure.checkpoint.load import load
from dure.checkpoint.parts import header_of
from dure.checkpoint.state import MODEL, WholeState
from dure.checkpoint.table import Table, TensorSpan
from dure.checkpoint.where import open_to_read
from dure.comm.group import Group
from dure.device.fingerprint import raw_bytes


def export_weights(run: RunFolder, out: Path, step: int | None = None) -> dict[str, Any]:
    """Write the newest checkpoint's weights, or those of `step`; returns what was written.

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
    spans = [
        span
        for span in whole.table.spans
        if span.name.startswith(MODEL) and span.name.removeprefix(MODEL) not in left_out
    ]
    spans.sort(key=lambda span: -span.dtype.itemsize)
    named = Table.of((span.name.removeprefix(MODEL), span.dtype, span.shape) for span in spans)
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


def _content(head: bytes, whole: WholeState, spans: list[TensorSpan]) -> Iterator[bytes | memoryview]:
    yield head
    for span in spans:
        yield raw_bytes(whole.elements(span.name))
