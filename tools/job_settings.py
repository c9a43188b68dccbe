"""Print docs/job.md's tables from the classes of `dure.config`: run it by hand after a change of a setting.

.venv/bin/python tools/job_settings.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dure.config import Job, Mount, ParamGroup, Toleration, Volume

_LISTS: dict[str, tuple[tuple[str, type[BaseModel]], ...]] = {
    "train": (("train.groups.", ParamGroup),),
    "cluster": (("cluster.mounts.", Mount),),
    "kubernetes": (("kubernetes.volumes.", Volume), ("kubernetes.tolerations.", Toleration)),
}
"""Tables that may stand more than once in a section."""


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """(prefix of the keys, class) of every table of a job file; the top level has no prefix."""
    yield "", Job
    for name, field in Job.model_fields.items():
        if _is_section(field):
            yield f"{name}.", field.annotation  # type: ignore[misc]
            yield from _LISTS.get(name, ())


def rows(prefix: str, section: type[BaseModel]) -> Iterator[tuple[str, str, str]]:
    """(key, default, sentence) of every setting of a section."""
    for name, field in section.model_fields.items():
        if not _is_section(field):
            yield prefix + name, _default(field), re.sub(r"\s+", " ", field.description or "")


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.default
    if value is None or value in ({}, ()):
        return "none"
    return f"`{json.dumps(value)}`"


def main() -> None:
    """Print all tables."""
    for prefix, section in sections():
        table = "[[{}]]" if any(section in dict(kinds).values() for kinds in _LISTS.values()) else "[{}]"
        title = f"`{table.format(prefix.rstrip('.'))}`" if prefix else "The top of the file"
        print(f"## {title}\n\n{section.__doc__}\n\n| setting | default | |\n|---|---|---|")
        for key, default, sentence in rows(prefix, section):
            print(f"| `{key}` | {default} | {sentence} |")
        print()


if __name__ == "__main__":
    main()
