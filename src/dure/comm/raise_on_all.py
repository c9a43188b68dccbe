"""An error of one rank is raised on all ranks, with that rank's number."""

from __future__ import annotations

import json
from collections.abc import Callable

from dure.base import errors
from dure.base.errors import DureError, PeerLost
from dure.comm.group import Group


def raise_on_all(group: Group, what: str, call: Callable[[], str]) -> list[str]:
    """Everyone's answers, in rank order; when `call` raised on any rank, its error on all of them."""
    trouble: Exception | None = None
    answer = ""
    try:
        answer = call()
    except Exception as error:
        trouble = error
    try:
        told = group.gather(json.dumps([_kind(trouble), _words(trouble), answer]), what)
    except PeerLost as lost:
        raise trouble or lost from lost
    everyones = [json.loads(text) for text in told]
    _raise_first(everyones, trouble)
    return [text for _, _, text in everyones]


def _raise_first(everyones: list[list[str]], own: Exception | None) -> None:
    """Raise the first rank's trouble, if there is any; that of ranks which only lost others comes last."""
    in_trouble = [(kind == PeerLost.__name__, rank) for rank, (kind, _, _) in enumerate(everyones) if kind]
    if not in_trouble:
        return
    if len(everyones) == 1 and own is not None:
        raise own
    _, rank = min(in_trouble)
    kind, words, _ = everyones[rank]
    known = getattr(errors, kind, None)
    ours = known if isinstance(known, type) and issubclass(known, DureError) else DureError
    all_alike = all(other[:2] == everyones[0][:2] for other in everyones)
    raise ours(words if all_alike else f"rank {rank}: {words}") from own


def _kind(trouble: Exception | None) -> str:
    """The nearest error of ours that it is."""
    if trouble is None:
        return ""
    return next(
        (kind.__name__ for kind in type(trouble).__mro__ if hasattr(errors, kind.__name__)), "DureError"
    )


def _words(trouble: Exception | None) -> str:
    if trouble is None or isinstance(trouble, DureError):
        return str(trouble or "")
    return f"{type(trouble).__name__}: {trouble}"
