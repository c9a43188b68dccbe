"""A file that is written whole has just the parts' bytes, whichever of them went past the page cache."""

import hashlib
import mmap
import os
import subprocess
import sys

import pytest

from dure.base.files import write_whole

PAGE = mmap.PAGESIZE
LARGE = 2 << 20


def pages(nbytes, seed=0):
    """Memory that begins at a page, with bytes of its own."""
    memory = memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]
    block = hashlib.sha512(bytes([seed])).digest() * (nbytes // 64 + 1)
    memory[:] = block[:nbytes]
    return memory


@pytest.mark.parametrize(
    "parts",
    [
        [b"x" * PAGE, pages(LARGE)],  # a head of a page, then pages
        [b"x" * PAGE, pages(LARGE, 1), pages(LARGE + 77, 2)],  # an end that is no page
        [b"x" * PAGE, pages(LARGE + 1, 3), pages(LARGE, 4), b"end"],  # after that nothing lies at a page
        [b"x" * 10, pages(LARGE, 5)],
        [pages(LARGE, 6)[8:], b"end"],  # memory that begins inside of a page
        [pages(LARGE, 7)],
        [],
    ],
)
def test_a_file_has_the_bytes_of_its_parts_wherever_they_lie(tmp_path, parts):
    write_whole(tmp_path / "file", iter(parts))
    assert (tmp_path / "file").read_bytes() == b"".join(parts)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a file system")
def test_a_file_system_that_cannot_write_past_the_cache_gets_the_same_bytes(tmp_path):
    """ramfs has nothing but the cache, and refuses."""
    program = (
        "import mmap, os, sys; from pathlib import Path; from dure.base.files import write_whole\n"
        "memory = mmap.mmap(-1, 2 << 20); memory[:] = os.urandom(2 << 20); place = Path(sys.argv[1]) / 'file'\n"
        "try:\n    os.close(os.open(place, os.O_CREAT | os.O_WRONLY | os.O_DIRECT))\n"
        "except OSError: print('refused')\n"
        "write_whole(place, [memoryview(memory), b'end'])\n"
        "print(place.read_bytes() == memory[:] + b'end', os.listdir(sys.argv[1]))\n"
    )
    if subprocess.run(
        ["unshare", "--mount", "true"], capture_output=True, timeout=30, check=False
    ).returncode:
        pytest.skip("the kernel refuses mount namespaces")
    script = 'mount -t ramfs none "$1" && exec "$2" -c "$3" "$1"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", tmp_path, sys.executable, program],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == ["refused", "True ['file']"]
