"""Shared storage in an S3 bucket, as one node sees it: what the job reads, and where it saves."""

from __future__ import annotations

import contextlib

from dure.base.errors import DureError, StorageError
from dure.doctor.checks.storage import MARK
from dure.doctor.finding import Finding, bad, good
from dure.doctor.plan import JobNeeds
from dure.storage import Store, open_store
from dure.storage.answers import Trouble, trouble_of

_WORDS: dict[Trouble, str] = {
    "no_bucket": "storage.no_bucket",
    "no_credentials": "storage.no_credentials",
    "refused": "storage.denied",
    "silent": "storage.silent",
}


def there(plan: JobNeeds, node: str) -> Finding:
    """Whether the bucket, and what the job reads of it, can be read from this node."""
    needs = [path for path in plan.needs if "://" in path]
    place = plan.bucket or needs[0]
    try:
        if plan.bucket is not None:
            open_store(plan.bucket, read_only=True).names("")
        missing = [path for path in needs if not _is_there(path)]
    except DureError as error:
        return _failed("storage", node, place, error)
    if missing:
        return bad("storage", node, "storage.lacks", path=place, missing=", ".join(missing))
    return good("storage", node, "storage.there", path=place)


def takes(plan: JobNeeds, node: str, token: str) -> Finding:
    """Whether checkpoints can be saved: put, get, delete, and a put that refuses to replace, as a manifest's must.

    A mark stays until `forget`.
    """
    assert plan.saves is not None
    once = f"{_mark(token, node)}-once"
    try:
        store = open_store(plan.saves)
        store.write_whole(_mark(token, node), [token.encode()])
        if _content(store, _mark(token, node)) != token:
            raise StorageError(f"{plan.saves}: gives back other bytes than were put")
        store.write_whole(once, [b"1"], only_if_absent=True)
        refuses = _refuses_another(store, once)
        store.remove(once)
        if store.exists(once):
            raise StorageError(f"{plan.saves}: does not delete")
    except DureError as error:
        return _failed("read_write", node, plan.saves, error)
    if not refuses:
        return bad("read_write", node, "read_write.unconditional", path=plan.saves)
    return good("read_write", node, "read_write.puts", path=plan.saves)


def seen(plan: JobNeeds, token: str, writers: list[str]) -> list[str]:
    """Of the nodes that wrote, those whose mark this node can read."""
    assert plan.saves is not None
    store = open_store(plan.saves, read_only=True)
    found = []
    for writer in writers:
        with contextlib.suppress(StorageError):
            if _content(store, _mark(token, writer)) == token:
                found.append(writer)
    return found


def forget(plan: JobNeeds, node: str, token: str) -> None:
    """Remove what `takes` wrote."""
    if plan.saves is not None:
        with contextlib.suppress(DureError):
            store = open_store(plan.saves)
            for name in (_mark(token, node), f"{_mark(token, node)}-once"):
                store.remove(name)


def _is_there(location: str) -> bool:
    """Whether there is a file of this name, or files below it."""
    scheme, _, path = location.partition("://")
    bucket, _, name = path.partition("/")
    store = open_store(f"{scheme}://{bucket}", read_only=True)
    return bool(store.names(name)) or (name != "" and store.exists(name))


def _refuses_another(store: Store, name: str) -> bool:
    try:
        store.write_whole(name, [b"2"], only_if_absent=True)
    except StorageError:
        return _content(store, name) == "1"
    return False


def _content(store: Store, name: str) -> str:
    return store.read(name, 0, store.size(name)).decode(errors="replace")


def _failed(check: str, node: str, place: str, error: DureError) -> Finding:
    cause = error.__cause__
    kind = trouble_of(cause) if isinstance(error, StorageError) and isinstance(cause, Exception) else "other"
    if kind not in _WORDS:
        return bad(check, node, "storage.broken", reason=str(error))
    # What happened, without the way out that the storage's own words end with: these have one in both languages.
    happened = str(error).removeprefix(f"{place}: ").partition("; ")[0]
    return bad(check, node, _WORDS[kind], path=place, reason=happened)


def _mark(token: str, node: str) -> str:
    return f"{MARK}{token}-{node.replace('/', '_')}"
