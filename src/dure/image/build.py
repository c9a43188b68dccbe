"""Pack the interpreter, the environment and the project into one squashfs file: same inputs, same bytes.

Everything is streamed as a tar archive into mksquashfs, in a fixed order, with fixed owners, modes and times; there is
no copy on disk, and neither root nor a container tool is needed.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import dure
from dure.base.errors import UsageError
from dure.image import digest
from dure.image.bytecode import compiled_entries
from dure.image.contents import (
    HOME,
    MANIFEST,
    PROJECT,
    Entry,
    folder_entries,
    in_order,
    system_entries,
    wanted_of_project,
    wanted_of_standard,
)
from dure.image.libraries import system_library_entries
from dure.image.packages import chosen, package_entries
from dure.image.squash import Progress, pack, squash_command


@dataclass(frozen=True)
class Built:
    """An image that was built."""

    image: str
    digest: str
    bytes: int
    unpacked_bytes: int
    files: int
    seconds: float
    python: str
    torch: str | None
    dure: str
    packages: int

    def as_json(self) -> dict[str, object]:
        """For `--json`."""
        return asdict(self)


def build(
    out: Path,
    *,
    packages: Sequence[str] = (),
    project: Path | None = None,
    compression: str = "zstd",
    level: int | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Built:
    """Build the image of this interpreter's environment; `packages` limits it to those and what they require."""
    began = time.perf_counter()
    squash = squash_command(compression, level)
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise UsageError(f"cannot write the image {out}: give a file in a folder that is there")
    progress("listing files", 0, 0)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    inside = {found.metadata["Name"]: found.version for found in chosen(packages)}
    entries = list(_environment_entries(packages, version))
    if project is not None:
        if not project.is_dir():
            raise UsageError(f"--project {project}: there is no such folder")
        entries.extend(folder_entries(project.absolute(), PROJECT, wanted_of_project))
    entries.append(Entry(MANIFEST, data=_manifest(inside)))
    ordered = in_order(entries)
    packed = pack(out, ordered, squash, progress, compiled=compiled_entries(ordered))
    recorded = digest.digest_of(out)
    digest.record(out, recorded)
    return Built(
        image=str(out),
        digest=recorded,
        bytes=out.stat().st_size,
        unpacked_bytes=packed.bytes,
        files=packed.files,
        seconds=round(time.perf_counter() - began, 1),
        python=platform.python_version(),
        torch=inside.get("torch"),
        dure=dure.__version__,
        packages=len(inside),
    )


def _manifest(packages: dict[str, str]) -> bytes:
    said = {
        "format": 1,
        "python": platform.python_version(),
        "torch": packages.get("torch"),
        "dure": dure.__version__,
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "packages": packages,
    }
    return (json.dumps(said, indent=1) + "\n").encode()


def _environment_entries(packages: Sequence[str], version: str) -> Iterator[Entry]:
    """Interpreter, standard library, packages, and what they need of the system."""
    interpreter = Path(os.path.realpath(sys.executable))
    standard = Path(
        sysconfig.get_path("stdlib", vars={"base": sys.base_prefix, "installed_base": sys.base_prefix})
    )
    entries = [
        Entry(f"{HOME}/bin/python{version}", source=interpreter, executable=True),
        Entry(f"{HOME}/bin/python", link=f"python{version}"),
        Entry(f"{HOME}/bin/python3", link=f"python{version}"),
        *folder_entries(standard, f"{HOME}/lib/python{version}", wanted_of_standard),
        *package_entries(packages, version),
        *system_entries(),
    ]
    if "deb_system" in sysconfig.get_scheme_names():
        # Debian's interpreter looks in folders of its own.
        entries.append(Entry(f"{HOME}/lib/python3/dist-packages", link=f"../python{version}/site-packages"))
    binaries = [
        entry.source for entry in entries if entry.source is not None and re.search(r"\.so(\.|$)", entry.path)
    ]
    yield from entries
    names = {Path(entry.path).name for entry in entries if entry.path.startswith(f"{HOME}/lib/python")}
    yield from system_library_entries([interpreter, *binaries], names)
