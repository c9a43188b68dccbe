"""Run a command inside an image with bubblewrap, and stand between it and whoever started us.

This process stays: it hands signals on to the command, ends with the command's exit code, and holds the namespace that
the image is mounted in. When it is killed, the kernel ends everything inside and takes the mount away.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from dure.base.errors import DureError, UsageError
from dure.base.say import say
from dure.device.words import DRIVER_LIBRARY
from dure.image.environment import complete
from dure.image.mounts import Mounted
from dure.image.runner import bubblewrap_command
from dure.image.tree import WAYS, find_tree

HANDED_ON = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH,
)  # fmt: skip
_HOST_FILES = ("/etc/hosts", "/etc/resolv.conf", "/etc/passwd", "/etc/group", "/etc/localtime")
"""Of the node rather than of the image: names of hosts and users."""
_NOT_OF_THE_IMAGE = {
    "/dev", "/home", "/media", "/mnt", "/opt", "/proc", "/root", "/run", "/sys", "/tmp", "/var",
}  # fmt: skip
"""Empty in an image; inside, they are the kernel's, of the node, or made anew."""
_DRIVER = "/run/driver"
_DEVICES = ("/dev/nvidia*", "/dev/infiniband", "/dev/dri", "/dev/kfd")


def run_inside(
    image: Path,
    digest: str,
    mounts: Sequence[Mounted],
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    workdir: str = "/",
    ways: tuple[str, ...] = WAYS,
) -> int:
    """Run `command` in the image until it ends; returns its exit code (128 + n for signal n)."""
    if shutil.which("bwrap") is None:
        raise UsageError(
            "there is no bwrap, which isolates the image; install bubblewrap (Debian: apt install bubblewrap)"
        )
    tree = find_tree(image, digest, ways)
    folders, links = _own_of(tree.path)
    driver = _driver_files()
    if driver:
        environment = {**environment, "LD_LIBRARY_PATH": _DRIVER}
    # A job that stands in /tmp itself is mounted there, read-only.
    temporary = "/var/tmp" if any(mount.covers("/tmp") for mount in mounts) else "/tmp"
    # nohup: what was ignored stays ignored, inside too.
    waited = {signal.SIGCHLD, *(number for number in HANDED_ON if signal.getsignal(number) != signal.SIG_IGN)}
    # Blocked before the command starts: none is lost, and bubblewrap, which inherits this, does not obey them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    try:
        reader, writer = os.pipe()
        host_data = _host_data(tree.path)
        line = bubblewrap_command(
            tree.path,
            mounts,
            command,
            folders=folders,
            links=links,
            workdir=workdir,
            host_files=driver,
            host_data=host_data,
            devices=sorted(path for pattern in _DEVICES for path in glob.glob(pattern)),
            info_fd=writer,
            map_user=tree.map_user,
        )
        # A session of its own, so that Ctrl-C, which reaches all of a terminal's group, comes once: from here.
        process = subprocess.Popen(
            line,
            env=complete(environment, temporary),
            pass_fds=[writer, *(descriptor for descriptor, _ in host_data)],
            start_new_session=True,
        )
        for descriptor in (writer, *(descriptor for descriptor, _ in host_data)):
            os.close(descriptor)
        return _wait(process, reader, waited)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _own_of(tree: str) -> tuple[list[str], dict[str, str]]:
    """The image's own folders and links; those of /opt one by one, so that others can be mounted beside them."""
    folders, links = [], {}
    for place in ("/", "/opt/"):
        for found in sorted(os.scandir(f"{tree}{place}"), key=lambda found: found.name):
            path = f"{place}{found.name}"
            if found.is_symlink():
                links[path] = os.readlink(found.path)
            elif found.is_dir() and path not in _NOT_OF_THE_IMAGE:
                folders.append(path)
    return folders, links


def _host_data(tree: str) -> list[tuple[int, str]]:
    return [
        (os.open(path, os.O_RDONLY | os.O_CLOEXEC), path)
        for path in _HOST_FILES
        if os.path.exists(f"{tree}{path}") and os.path.exists(path)
    ]


def _driver_files() -> list[tuple[str, str]]:
    """The libraries of the NVIDIA driver, which have to be those of the node's kernel module."""
    ldconfig = shutil.which("ldconfig", path="/sbin:/usr/sbin:/usr/bin")
    if not os.path.exists("/dev/nvidiactl") or ldconfig is None:
        return []
    listed = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, timeout=60, check=False).stdout
    found = re.findall(rf"^\s*({DRIVER_LIBRARY}) \(libc6,[^)]+\) => (\S+)$", listed, re.MULTILINE)
    return [(path, f"{_DRIVER}/{name}") for name, path in found]


def _wait(process: subprocess.Popen[bytes], reader: int, waited: set[signal.Signals]) -> int:
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read()  # bubblewrap writes, and closes, when the namespaces are there; or when it fails
    first = json.loads(said)["child-pid"] if said else None
    while True:
        code = process.poll()
        if code is not None:
            break
        number = signal.sigwait(waited)
        if number != signal.SIGCHLD and first is not None:
            _hand_on(first, number)
    if first is None:
        raise DureError(f"bubblewrap could not start (exit code {code}); it says why above")
    return code if code >= 0 else 128 - code


def _hand_on(first: int, number: int) -> None:
    """Send a signal to the command: the one child of the namespace's first process, which only reaps."""
    try:
        with open(f"/proc/{first}/task/{first}/children", encoding="ascii") as file:
            children = file.read().split()
        for child in children[:1]:
            os.kill(int(child), number)
    except (OSError, ValueError) as error:
        say(f"the signal {number} could not be handed on: {error}")
