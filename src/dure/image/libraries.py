"""The shared libraries and the few programs that the interpreter and its packages need from the system."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from dure.base.errors import UsageError
from dure.image.contents import Entry

PROGRAMS = (
    "cat", "dd", "df", "env", "grep", "head", "hostname", "id", "ip", "kill", "ls", "mkdir", "ps", "rm", "sh", "sleep",
    "stat", "tail", "touch", "true", "uname",
)  # fmt: skip
"""`sh` and `env` are what pyxis, enroot and apptainer start commands with; the others help a person who looks around.
Those that the building machine lacks are left out."""

_LOADED_BY_NAME = ("libgcc_s.so.1", "libnss_dns.so.2", "libnss_files.so.2", "libresolv.so.2")
"""Opened by glibc while it runs, so nothing lists them."""
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")

_FOUND = re.compile(r"^\s+(?:(\S+) => )?(/\S+) \(0x[0-9a-f]+\)$")


def system_library_entries(binaries: Iterable[Path], packed: Iterable[str]) -> Iterator[Entry]:
    """The libraries that these files need and that are not `packed` (by name) already, the loader, the programs.

    All libraries stand in the folder that holds the C library: the loader looks there without being told.
    """
    programs = [
        Path(path) for name in PROGRAMS if (path := shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin"))
    ]
    found = _needed([*binaries, *programs])
    libc = found.get("libc.so.6")
    if libc is None:
        raise UsageError(
            "the interpreter is not linked to glibc (libc.so.6); an image can only be built from one that is"
        )
    folder = _merged(libc.parent)
    for name in _LOADED_BY_NAME:
        if (libc.parent / name).exists():
            found.setdefault(name, libc.parent / name)
    inside = set(packed)
    for name, library in found.items():
        if name.startswith("ld-linux"):
            yield Entry(f"{_merged(library.parent)}/{name}", source=library, executable=True)
        elif name not in inside:
            yield Entry(f"{folder}/{name}", source=library, executable=True)
    for program in programs:
        yield Entry(f"/usr/bin/{program.name}", source=program, executable=True)
    if _CERTIFICATES.exists():
        yield Entry(str(_CERTIFICATES), source=_CERTIFICATES)


def _needed(binaries: list[Path]) -> dict[str, Path]:
    """Name → path of every library that the loader would load for these files."""
    try:
        listed = subprocess.run(
            ["ldd", *map(str, binaries)], capture_output=True, text=True, timeout=300, check=False,
            env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
    except FileNotFoundError:
        raise UsageError(
            "there is no ldd, which finds the libraries; install libc-bin (Debian) or glibc-common"
        ) from None
    found: dict[str, Path] = {}
    for line in listed.stdout.splitlines():
        library = _FOUND.match(line)
        if library is not None:
            path = Path(library[2])
            found.setdefault(path.name if library[1] is None or "/" in library[1] else library[1], path)
    return found


def _merged(folder: Path) -> str:
    """/lib/… and /lib64/… as the image spells them, where they are links into /usr."""
    text = str(folder)
    return f"/usr{text}" if re.match(r"/lib(64)?(/|$)", text) else text
