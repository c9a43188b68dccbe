"""Ways to the files of an image: the kernel's squashfs, squashfuse, or unpacked once into a cache.

The first two mount in a mount namespace of this process's own. When the process ends, however it ends, the kernel
takes the mount (and the loop device) away with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dure.base.errors import DureError, UsageError
from dure.image.contents import PYTHON

WAYS = ("loop", "squashfuse", "unpack")
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18
_LOCK_SECONDS = 600.0
_FUSE_SECONDS = 20.0


@dataclass(frozen=True)
class Tree:
    """Where the image's files are, and how they got there."""

    path: str
    way: str
    map_user: tuple[int, int] | None = None
    """Who this user was before it became root of a user namespace, in order to mount."""


def find_tree(image: Path, digest: str, ways: tuple[str, ...] = WAYS) -> Tree:
    """The first way that works here; the others' reasons are told when none does."""
    reasons = []
    for way in ways:
        try:
            return {"loop": _by_kernel, "squashfuse": _by_fuse, "unpack": _unpacked}[way](image, digest)
        except _NotThisWay as reason:
            reasons.append(f"{way}: {reason}")
    raise DureError(f"cannot get at the files of {image}: {'; '.join(reasons)}")


class _NotThisWay(Exception):
    pass


def cache() -> Path:
    """Where unpacked images are kept, and the (always empty) folder to mount on."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "dure" / "images"


def _by_kernel(image: Path, digest: str) -> Tree:
    if os.geteuid() != 0:
        raise _NotThisWay("mounting with the kernel takes root")
    if shutil.which("mount") is None:
        raise _NotThisWay("there is no mount")
    point = _mount_point()
    _unshare(_CLONE_NEWNS)
    done = subprocess.run(
        ["mount", "--types", "squashfs", "--options", "loop,ro,nosuid,nodev", "--", str(image.absolute()), str(point)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise _NotThisWay(" ".join(done.stderr.split()) or f"mount ended with {done.returncode}")
    return Tree(_with_interpreter(point, image), "loop")


def _by_fuse(image: Path, digest: str) -> Tree:
    for program in ("squashfuse", "setpriv"):
        if shutil.which(program) is None:
            raise _NotThisWay(f"there is no {program}")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise _NotThisWay("/dev/fuse is not there for this user")
    point = _mount_point()
    map_user = None
    if os.geteuid() == 0:
        _unshare(_CLONE_NEWNS)
    else:
        map_user = (os.geteuid(), os.getegid())
        _unshare(_CLONE_NEWUSER | _CLONE_NEWNS)
        for name, line in (
            ("setgroups", "deny"), ("uid_map", f"0 {map_user[0]} 1"), ("gid_map", f"0 {map_user[1]} 1"),
        ):  # fmt: skip
            Path("/proc/self", name).write_text(line)
    empty = os.stat(point).st_dev
    server = subprocess.Popen(
        [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "squashfuse",
            "-f",
            "-o",
            "ro,nosuid,nodev",
            str(image.absolute()),
            str(point),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the command inside
    )
    deadline = time.monotonic() + _FUSE_SECONDS
    while os.stat(point).st_dev == empty:
        if server.poll() is not None:
            raise _NotThisWay(f"squashfuse ended with {server.returncode}")
        if time.monotonic() > deadline:
            server.kill()
            raise _NotThisWay(f"squashfuse did not mount within {_FUSE_SECONDS:.0f} s")
        time.sleep(0.005)
    return Tree(_with_interpreter(point, image), "squashfuse", map_user)


def _unpacked(image: Path, digest: str) -> Tree:
    """The cached copy of exactly this image, made now if there is none; of several processes, one makes it."""
    where = cache() / digest
    if where.is_dir():
        return Tree(_with_interpreter(where, image), "unpack")
    if shutil.which("unsquashfs") is None:
        raise _NotThisWay("there is no unsquashfs (squashfs-tools)")
    try:
        cache().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _NotThisWay(f"cannot make the cache {cache()}: {error.strerror}") from None
    with _locked(cache() / f"{digest}.lock", digest):
        if not where.is_dir():
            part = cache() / f".{digest}.part"
            shutil.rmtree(part, ignore_errors=True)  # of one that was killed while it held the lock
            try:
                done = subprocess.run(
                    ["unsquashfs", "-quiet", "-no-progress", "-no-xattrs", "-dest", str(part), str(image.absolute())],
                    capture_output=True, text=True, timeout=_LOCK_SECONDS, check=False,
                )  # fmt: skip
                if done.returncode != 0:
                    raise _NotThisWay(
                        f"unsquashfs ended with {done.returncode}: {' '.join(done.stderr.split())[-200:]}"
                    )
                part.rename(where)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    return Tree(_with_interpreter(where, image), "unpack")


@contextlib.contextmanager
def _locked(path: Path, digest: str) -> Iterator[None]:
    deadline = time.monotonic() + _LOCK_SECONDS
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DureError(
                        f"another process has been unpacking the image {digest[:16]}… for {_LOCK_SECONDS:.0f} s; it "
                        f"holds {path}"
                    ) from None
                time.sleep(0.1)
        yield


def _with_interpreter(tree: Path, image: Path) -> str:
    if not os.path.lexists(f"{tree}{PYTHON}"):
        raise UsageError(
            f"the image {image} has no {PYTHON}; build it with `dure image build`, or link {PYTHON} to its interpreter"
        )
    return str(tree)


def _mount_point() -> Path:
    point = cache() / "mounted"
    try:
        point.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _NotThisWay(f"cannot make the folder {point}: {error.strerror}") from None
    return point


def _unshare(flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) != 0:
        raise _NotThisWay(f"no namespace of its own: {os.strerror(ctypes.get_errno())}")
    if libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) != 0:
        raise _NotThisWay(f"mounts cannot be kept to this process: {os.strerror(ctypes.get_errno())}")
