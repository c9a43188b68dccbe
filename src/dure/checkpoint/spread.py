"""A state from the memory of a node that has it to the nodes that have not: they have just come, or missed it."""

from __future__ import annotations

import json
from typing import Any

import torch

from dure.checkpoint.state import Piece, State, WholeState
from dure.checkpoint.table import Table
from dure.comm.group import Group

_CHUNK_BYTES = 16 << 20


def spread(found: WholeState | None, giver: int, group: Group, *, wanted: bool) -> State | None:
    """What the rank `giver` has `found`, all of it, on every rank where it is `wanted`. A collective call."""
    what = "bringing a state to a node that has none"
    told = (
        json.dumps([found.facts, found.table.to_plain()]) if found is not None and group.rank == giver else ""
    )
    facts, spans = json.loads(group.gather(told, what)[giver])
    table = Table.from_plain(spans)
    gives = found is not None and group.rank == giver
    kept = torch.empty(table.nbytes, dtype=torch.uint8) if wanted else None
    passing = torch.empty(0 if gives or wanted else min(_CHUNK_BYTES, table.nbytes), dtype=torch.uint8)
    for start in range(0, table.nbytes, _CHUNK_BYTES):
        end = min(start + _CHUNK_BYTES, table.nbytes)
        if gives:
            assert found is not None
            chunk = found.memory[start:end]
        else:
            chunk = passing[: end - start] if kept is None else kept[start:end]
        group.from_rank(giver, chunk, what)
    return None if kept is None else _all_of(facts, table, kept)


def _all_of(facts: dict[str, Any], table: Table, memory: torch.Tensor) -> State:
    whole = WholeState(facts, table, memory)
    pieces = tuple(Piece(span, 0, span.numel, whole.elements(span.name)) for span in table.spans)
    return State(facts, table, pieces, pieces)
