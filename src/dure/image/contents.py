"""What goes into an image, as a list of entries; reads nothing but names and modes until it is packed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dure.base.errors import UsageError

HOME = "/opt/dure"
"""The interpreter's prefix inside every image."""
PYTHON = f"{HOME}/bin/python"
"""The interpreter, by the path that every runner starts."""
MANIFEST = f"{HOME}/image.json"
"""What is inside: versions and packages."""
PROJECT = "/project"
"""Where `--project` is inside."""

MOUNT_POINTS = (
    "/dev/pts", "/dev/shm", "/home", "/mnt/shared", "/proc", "/root", "/run", "/sys", "/tmp", "/var/tmp",
)  # fmt: skip
"""Made beforehand, because a read-only image takes none when it runs."""
LINKS = {"/bin": "usr/bin", "/sbin": "usr/sbin", "/lib": "usr/lib", "/lib64": "usr/lib64"}

_ETC = {
    "/etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "/etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "/etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "/etc/resolv.conf": "",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    # enroot and pyxis read this one; the others are told by their runner.
    "/etc/environment": f"PATH={HOME}/bin:/usr/bin:/bin\nLANG=C.UTF-8\n",
    # enroot's command script: without it, enroot would start a login shell.
    "/etc/rc": 'exec "$@"\n',
}


@dataclass(frozen=True)
class Entry:
    """One file, link or folder of the image; exactly one of `source`, `data`, `link` is given, or none for a folder."""

    path: str
    """Absolute, inside the image."""
    source: Path | None = None
    data: bytes | None = None
    link: str | None = None
    executable: bool = False

    @property
    def is_folder(self) -> bool:
        """Whether this is a folder."""
        return self.source is None and self.data is None and self.link is None

    @property
    def size(self) -> int:
        """Bytes that it adds before compression."""
        if self.source is not None:
            return self.source.stat().st_size
        return len(self.data or b"")


# What a run never needs, by the names of folders and the endings of files. A rule here is about the interpreter's and
# the packages' files alone; the project's files are taken as they are.
_NEVER_FOLDERS = {"__pycache__", "test", "tests", "include", "idle_test", ".git"}
_NEVER_ENDINGS = (".pyc", ".pyo", ".a", ".h", ".hpp", ".cuh", ".cmake", ".pyi", ".pxd", ".lib")
_NEVER_PATHS = ("torch/share/",)
_ONLY_IN = {"torch/bin/": {"torch_shm_manager"}}
"""torch's own tools and tests; one of them is started by torch itself."""
_NEVER_STANDARD = {
    "ensurepip", "idlelib", "lib2to3", "site-packages", "dist-packages", "tkinter", "turtledemo", "turtle.py",
}  # fmt: skip
_NEVER_ENTERED = {"__pycache__", ".git", ".venv"}
"""Large, and never wanted of anything."""
_NEVER_PROJECT = {
    "__pycache__",
    ".git",
    ".venv",
    "venv",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    "runs",
}


def wanted_of_package(path: str) -> bool:
    """Whether a package's file, by its path in site-packages, is needed at run time."""
    parts = PurePosixPath(path).parts
    if not _NEVER_FOLDERS.isdisjoint(parts[:-1]) or parts[-1].endswith(_NEVER_ENDINGS):
        return False
    if path.startswith(_NEVER_PATHS):
        return False
    return all(parts[-1] in only for folder, only in _ONLY_IN.items() if path.startswith(folder))


def wanted_of_standard(path: str) -> bool:
    """Whether a file of the standard library, by its path there, is needed at run time."""
    first, name = PurePosixPath(path).parts[0], PurePosixPath(path).name
    if first in _NEVER_STANDARD or first.startswith("config-") or name.startswith("_tkinter."):
        return False
    return wanted_of_package(path)


def wanted_of_project(path: str) -> bool:
    """Whether a file of the project goes in: no other environments, earlier runs or images."""
    parts = PurePosixPath(path).parts
    return _NEVER_PROJECT.isdisjoint(parts) and not path.endswith((".pyc", ".sqsh", ".sqsh.sha256"))


def folder_entries(folder: Path, target: str, wanted: Callable[[str], bool]) -> Iterator[Entry]:
    """Entries of all wanted files below a folder."""
    top = os.path.realpath(folder)
    for place, names, files in os.walk(folder):
        inside = os.path.relpath(place, folder)
        prefix = "" if inside == "." else f"{inside}/"
        names[:] = sorted(set(names) - _NEVER_ENTERED)
        linked = [name for name in names if os.path.islink(os.path.join(place, name))]
        for name in sorted(files) + linked:
            if wanted(f"{prefix}{name}") and os.path.exists(
                os.path.join(place, name)
            ):  # a link may lead nowhere
                yield file_entry(Path(place, name), f"{target}/{prefix}{name}", top)


def file_entry(source: Path, target: str, top: str | None = None) -> Entry:
    """A file's entry. A link that stays below `top` stays a link; any other is followed."""
    if top is not None and source.is_symlink():
        link = os.readlink(source)
        leads_to = os.path.realpath(source)
        if not os.path.isabs(link) and leads_to.startswith(f"{top}{os.sep}"):
            return Entry(target, link=link)
        if os.path.isdir(leads_to):
            raise UsageError(
                f"{source} links to the folder {leads_to}, outside of what is packed; put the folder itself there"
            )
    return Entry(target, source=source, executable=os.access(source, os.X_OK))


def system_entries() -> Iterator[Entry]:
    """The file system around the interpreter: links, mount points, and a minimal /etc."""
    for path, link in LINKS.items():
        yield Entry(path, link=link)
    for path, text in _ETC.items():
        yield Entry(path, data=text.encode())
    for path in (*MOUNT_POINTS, "/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib64"):
        yield Entry(path)


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """Every path once (the first entry counts), the folders above each before it, sorted."""
    found: dict[str, Entry] = {}
    for entry in entries:
        found.setdefault(entry.path, entry)
    for path in list(found):
        for folder in PurePosixPath(path).parents:
            if str(folder) != "/" and str(folder) not in found:
                found[str(folder)] = Entry(str(folder))
    return sorted(found.values(), key=lambda entry: entry.path.split("/"))
