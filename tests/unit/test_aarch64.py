"""The C helpers compile for aarch64 and compute the same bits there, under qemu's emulation."""

import shutil
import subprocess
from pathlib import Path

import pytest

import dure

ROOM = Path(dure.__file__).parent
SOURCES = [
    ROOM / "comm/reduce/treesum.c",
    ROOM / "comm/shm_barrier.c",
    ROOM / "comm/backend/collectives.c",
    ROOM / "device/copying.c",
]
DRIVER = Path(__file__).with_name("aarch64_driver.c")
FLAGS = ["-O3", "-ffp-contract=off", "-std=c11"]  # as in setup.py
NEEDED = ("gcc", "aarch64-linux-gnu-gcc", "qemu-aarch64")
missing = [tool for tool in NEEDED if shutil.which(tool) is None]


@pytest.mark.skipif(
    bool(missing),
    reason=f"not installed: {', '.join(missing)} (packages gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, qemu-user)",
)
def test_sums_copies_and_the_barrier_are_the_same_bits_on_aarch64(tmp_path):
    def output_of(compiler, *runner):
        program = tmp_path / compiler
        command = [compiler, *FLAGS, "-Wall", "-Werror", "-static", "-pthread", *map(str, [DRIVER, *SOURCES])]
        subprocess.run([*command, "-o", str(program)], check=True, timeout=120)
        ran = subprocess.run([*runner, str(program)], check=True, timeout=120, capture_output=True, text=True)
        return ran.stdout

    here, there = output_of("gcc"), output_of("aarch64-linux-gnu-gcc", "qemu-aarch64")
    assert here == there
    assert here.count("bad 0 sum") == 4
    assert "barrier wrong 0" in here
