"""Small things that ranks do together, by plain values: what crosses the network is JSON, never pickle."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from dure.base.errors import UsageError
from dure.comm.group import Group
from dure.comm.raise_on_all import raise_on_all


def as_text(value: object, what: str) -> str:
    """A plain value as JSON; UsageError for anything that would not come back as it went."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{what}: {error}; give numbers, texts, lists and dicts (of a tensor: .tolist())"
        ) from None
    if json.loads(text) != value and value == value:  # a tuple, or a dict whose keys are numbers  # noqa: PLR0124
        raise UsageError(
            f"{what}: a {type(value).__name__} would not come back as it went; give lists for tuples, and texts as keys"
        )
    return text


def gather(group: Group, value: object) -> list[Any]:
    """Everyone's value, in rank order."""
    told = raise_on_all(group, "gathering values", lambda: as_text(value, "team.gather"))
    return [json.loads(text) for text in told]


def on_leader(
    group: Group, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What a function returned that rank 0 alone has called; what it raised is raised on all."""

    def called() -> str:
        return as_text(function(*args, **kwargs), "team.on_leader") if group.rank == 0 else ""

    return json.loads(raise_on_all(group, "waiting for rank 0", called)[0])
