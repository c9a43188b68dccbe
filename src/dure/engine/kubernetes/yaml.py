"""Plain values as YAML, for people to read and for kubectl. Whatever could be taken for something else is quoted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./=@-]*(:[A-Za-z0-9_./=@-]+)*")
_WORDS_OF_YAML = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null"))


def documents(values: list[dict[str, Any]]) -> str:
    """Several documents in one text."""
    return "---\n".join("\n".join(_lines(value)) + "\n" for value in values)


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, held in value.items():
            yield from _under(f"{_scalar(key)}:", held, "  " if isinstance(held, dict) else "")
    elif isinstance(value, list) and value:
        for held in value:
            first, *rest = list(_lines(held))
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)
    else:
        yield _scalar(value)


def _under(head: str, held: Any, indent: str) -> Iterator[str]:
    if isinstance(held, dict | list) and held:
        yield head
        yield from (f"{indent}{line}" for line in _lines(held))
    else:
        yield f"{head} {_scalar(held)}"


def _scalar(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN.fullmatch(value) and value.lower() not in _WORDS_OF_YAML:
        return value
    # JSON's own escapes are YAML's, but for characters that JSON writes as two.
    return '"' + "".join(map(_escaped, value)) + '"'


def _escaped(letter: str) -> str:
    if ord(letter) > 0xFFFF:
        return f"\\U{ord(letter):08x}"
    return "\\x7f" if letter == "\x7f" else json.dumps(letter)[1:-1]
