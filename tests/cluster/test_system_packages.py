"""tools/system-packages: quick when there is nothing to do, and never in the way of the tests."""

import shutil
import subprocess
from pathlib import Path

import pytest
from support.slurm import why_not_here

from dure.tools.bench import openmpi

SCRIPT = Path(__file__).parents[2] / "tools" / "system-packages"
COMMANDS = (
    *("dpkg-query", "shellcheck", "srun", "munged", "ip", "mpirun", "ps", "nft", "ssh", "sshd"),
    *("bwrap", "mksquashfs", "squashfuse", "aarch64-linux-gnu-gcc", "qemu-aarch64"),
)
ALL_INSTALLED = all(shutil.which(name) for name in COMMANDS) and openmpi.is_installed()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("script", [SCRIPT, SCRIPT.parents[1] / ".ci" / "run"], ids=lambda path: path.name)
def test_shell_scripts_pass_shellcheck(script):
    done = subprocess.run(["shellcheck", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(not ALL_INSTALLED, reason="the packages are not installed")
def test_with_everything_installed_it_says_and_does_nothing():
    done = subprocess.run([SCRIPT], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(why_not_here() is not None, reason=f"namespaces: {why_not_here()}")
def test_a_plain_user_is_told_what_is_missing_and_the_tests_go_on():
    # A machine without any package: an empty package database, seen by this process alone.
    enter = "mount -t tmpfs none /var/lib/dpkg && exec setpriv --reuid=65534 --clear-groups bash -s"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", enter],
        input=SCRIPT.read_text(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    for package in ("bubblewrap", "iproute2", "munge", "openssh-server", "qemu-user", "slurm-wlm"):
        assert f" {package} " in line.partition("missing:")[2]
    assert "skipped by name" in line
