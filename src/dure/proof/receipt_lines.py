"""The JSON lines beside a receipt's chain. Each has a hash of its own, and is written in one way only, so that no bit
of it can change unnoticed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dure.base.errors import ReceiptWrong
from dure.base.files import open_own, read_at_most

LONGEST = 1 << 30
_HASH = "sha256"


def canonical(value: dict[str, Any]) -> bytes:
    """The one way in which an object is written."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def sealed(value: dict[str, Any]) -> bytes:
    """An object with its own hash, as a line without its end."""
    return canonical({**value, _HASH: hashlib.sha256(canonical(value)).hexdigest()})


def unsealed(line: bytes, what: str) -> dict[str, Any]:
    """What `sealed` was given; ReceiptWrong when the line is not exactly that."""
    try:
        told = json.loads(line)
        value = {key: inner for key, inner in told.items() if key != _HASH}
        if sealed(value) == line:
            return value
    except (ValueError, AttributeError, RecursionError):
        pass
    raise ReceiptWrong(f"{what} was changed: its hash is not that of its content")


def append(path: Path, value: dict[str, Any]) -> None:
    """Add a line to a file."""
    with open(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
        file.write(sealed(value) + b"\n")


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """All lines of a file, nothing where there is none; a last one that a crash cut short is no line."""
    if not path.exists():
        return
    whole = read_at_most(path, LONGEST).split(b"\n")
    for number, line in enumerate(whole[:-1], 1):
        yield unsealed(line, f"{path}, line {number},")
    if whole[-1]:
        raise ReceiptWrong(f"{path} ends in the middle of a line")
