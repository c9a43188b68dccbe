"""The page's own files, from the package alone."""

from __future__ import annotations

from importlib.resources import files

_KINDS = (".js", ".css", ".html", ".svg")


def static_files() -> dict[str, bytes]:
    """By name; there are no folders."""
    folder = files("dure.page") / "static"
    return {one.name: one.read_bytes() for one in folder.iterdir() if one.name.endswith(_KINDS)}
