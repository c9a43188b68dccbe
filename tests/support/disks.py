"""File systems that are full, or that do not answer; for root only."""

import contextlib
import os
import subprocess

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a file system")


@contextlib.contextmanager
def small_disk(place, size):
    """A file system of its own at `place`, of `size` (as mount has it: 64k, 1m)."""
    place.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def fill(place):
    """Take all room that is left at `place`, but for no more than a page; returns the file that takes it."""
    filler = place / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filler


@contextlib.contextmanager
def disk_that_hangs(place, image):
    """A file system at `place` on which every write waits until the end of `with`."""
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, place], check=False, capture_output=True).returncode:
        pytest.skip("no loop devices here")
    try:
        subprocess.run(["fsfreeze", "-f", place], check=True)
        try:
            yield place
        finally:
            subprocess.run(["fsfreeze", "-u", place], check=True)
    finally:
        subprocess.run(["umount", "-l", place], check=True)
