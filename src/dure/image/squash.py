"""Entries into a squashfs file, by way of a tar archive that mksquashfs reads as it is written."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import tarfile
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dure.base.errors import DureError, UsageError
from dure.image.contents import Entry

EPOCH = 315_532_800
"""The time of every file in an image, 1980-01-01, unless SOURCE_DATE_EPOCH says another."""
LEVELS = {"zstd": 3, "gzip": 6}
_OLDEST = (4, 5)
"""The first mksquashfs that reads a tar archive."""
_OPEN_TO_ALL = {"/tmp", "/var/tmp", "/dev/shm"}

Progress = Callable[[str, int, int], None]
"""Told what is done, bytes so far, and bytes in all (0: not known)."""


@dataclass(frozen=True)
class Packed:
    """How much went in."""

    files: int
    bytes: int


def pack(
    out: Path,
    entries: Sequence[Entry],
    squash: Sequence[str],
    progress: Progress = lambda what, done, total: None,
    *,
    compiled: Iterable[Entry] = (),
) -> Packed:
    """Stream entries into mksquashfs; `out` appears whole, or not at all."""
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH", EPOCH))
    total = sum(entry.size for entry in entries)
    part = out.with_name(f".{uuid.uuid4().hex}.part")
    environment = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    command = [squash[0], "-", str(part), *squash[1:], "-mkfs-time", str(epoch), "-all-time", str(epoch)]
    files = done = 0
    try:
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment
        ) as process:
            assert process.stdin is not None
            assert process.stderr is not None
            try:
                with tarfile.open(
                    fileobj=process.stdin,
                    mode="w|",
                    format=tarfile.PAX_FORMAT,
                    bufsize=1 << 20,
                ) as archive:
                    for entry in entries:
                        done += _add(archive, entry, epoch)
                        files += not entry.is_folder
                        progress("packing", done, total)
                    folders: set[str] = set()
                    for entry in compiled:
                        folder = entry.path.rpartition("/")[0]
                        if folder not in folders:
                            folders.add(folder)
                            _add(archive, Entry(folder), epoch)
                        done += _add(archive, entry, epoch)
                        files += 1
                        progress("packing compiled files", done, 0)
                process.stdin.close()
            except BrokenPipeError:
                pass  # mksquashfs ended first, and says why
            except BaseException:
                process.kill()
                raise
            complaint = process.stderr.read().decode(errors="replace").strip()
        if process.returncode != 0:
            raise DureError(f"mksquashfs could not write {out} (exit code {process.returncode}): {complaint}")
        os.chmod(part, 0o644)
        os.replace(part, out)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
    return Packed(files, done)


def _add(archive: tarfile.TarFile, entry: Entry, epoch: int) -> int:
    """Add one entry; returns its bytes."""
    info = tarfile.TarInfo(entry.path.lstrip("/"))
    info.mtime = epoch
    info.mode = 0o755 if entry.executable or entry.is_folder else 0o644
    if entry.path in _OPEN_TO_ALL:
        info.mode = 0o1777
    if entry.is_folder:
        info.type = tarfile.DIRTYPE
        archive.addfile(info)
        return 0
    if entry.link is not None:
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, entry.link, 0o777
        archive.addfile(info)
        return 0
    with entry.source.open("rb") if entry.source is not None else io.BytesIO(entry.data or b"") as file:
        info.size = _size(file)
        archive.addfile(info, file)
    return info.size


def _size(file: IO[bytes]) -> int:
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    return size


def squash_command(compression: str, level: int | None) -> list[str]:
    """mksquashfs and its options, without the files; refuses one that is too old."""
    if compression not in LEVELS:
        raise UsageError(f"--compression {compression}: choose one of {', '.join(LEVELS)}")
    program = shutil.which("mksquashfs")
    if program is None:
        raise UsageError(
            "there is no mksquashfs; install squashfs-tools (Debian: apt install squashfs-tools)"
        )
    said = subprocess.run(
        [program, "-version"], capture_output=True, text=True, timeout=60, check=False
    ).stdout
    found = re.search(r"version (\d+)\.(\d+)", said)
    if found is not None and (int(found[1]), int(found[2])) < _OLDEST:
        raise UsageError(
            f"mksquashfs is {found[1]}.{found[2]}, but 4.5 or newer is needed (it reads tar archives)"
        )
    return [
        program, "-tar", "-comp", compression, "-Xcompression-level", str(level or LEVELS[compression]),
        "-all-root", "-root-mode", "755", "-no-xattrs", "-noappend", "-reproducible", "-no-progress", "-quiet",
        "-processors", str(len(os.sched_getaffinity(0))),
    ]  # fmt: skip
