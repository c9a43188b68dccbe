"""The exact command lines that run something inside an image: pyxis, enroot, apptainer, and ours. Pure functions.

Each is written from the runner's own documentation. A path or a value that its syntax cannot say is refused by name:
pyxis and enroot turn mounts into lines of an fstab through a shell, apptainer splits them at colons and commas.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dure.base.errors import JobError
from dure.image.contents import HOME, LINKS, PYTHON
from dure.image.mounts import Mounted, written

_SHELL_SAFE = re.compile(r"[\w/.+=@%~^-]*")
"""What a path may hold where it goes through an fstab and a shell: letters and digits of any script, and these."""
_NOT_IN_BIND = set(':,\\"\n\r')


@dataclass(frozen=True)
class ContainerSpec:
    """An image with what is mounted and set in it."""

    image: str
    """Absolute."""
    mounts: tuple[Mounted, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "/"


def pyxis_options(place: ContainerSpec) -> list[str]:
    """Options of `srun`; the environment goes by `--export`, since pyxis hands in all that the task has."""
    mounts = []
    for mount in place.mounts:
        _refuse_unsafe("pyxis", mount)
        mounts.append(f"{mount.source}:{mount.target}:{'rw' if mount.writable else 'ro'}")
    for name, value in place.environment.items():
        if not _SHELL_SAFE.fullmatch(value.replace(":", "")):
            raise JobError(
                f"the variable {name} is {value!r}, which srun's --export cannot say; unset it, or use another "
                "cluster.runner"
            )
    options = [f"--container-image={_safe_image('pyxis', place.image)}"]
    if mounts:
        options.append(f"--container-mounts={','.join(mounts)}")
    options += [
        "--container-readonly",
        "--no-container-mount-home",
        "--no-container-remap-root",
        "--no-container-entrypoint",
        f"--container-workdir={place.workdir}",
    ]
    if place.environment:
        options.append(f"--container-env={','.join(place.environment)}")
        options.append(f"--export={','.join(f'{name}={value}' for name, value in place.environment.items())}")
    return options


def enroot_command(place: ContainerSpec, command: Sequence[str]) -> list[str]:
    """`enroot start` with the image itself; its root is read-only unless it is asked for otherwise."""
    line = ["enroot", "start"]
    for mount in place.mounts:
        _refuse_unsafe("enroot", mount)
        access = "rw" if mount.writable else "ro"
        line += ["--mount", f"{mount.source}:{mount.target}:x-create=auto,rbind,{access}"]
    for name, value in place.environment.items():
        if re.search(r"[\n\r]", value):
            raise JobError(f"the variable {name} is {value!r}: enroot cannot pass a line break; unset it")
        line += ["--env", f"{name}={value}"]
    return [*line, "--", _safe_image("enroot", place.image), *command]


def apptainer_command(
    place: ContainerSpec, command: Sequence[str], *, program: str = "apptainer", gpus: bool = False
) -> list[str]:
    """`apptainer exec` (or singularity), with nothing of the host but what is mounted.

    The environment goes through APPTAINERENV_ variables: `--env` would split a value at its commas.
    """
    prefix = "APPTAINERENV" if program == "apptainer" else "SINGULARITYENV"
    line = ["env", *(f"{prefix}_{name}={value}" for name, value in place.environment.items())]
    line += [
        program,
        "exec",
        "--cleanenv",
        "--no-eval",
        "--no-home",
        "--contain",
        *(["--nv"] if gpus else []),
    ]
    # --contain brings a /dev/shm of its own, too small for gradients.
    for mount in (Mounted("/dev/shm", "/dev/shm", writable=True), *place.mounts):
        for path in (mount.source, mount.target):
            bad = sorted(_NOT_IN_BIND.intersection(path))
            if bad:
                raise JobError(
                    f"the mount {path!r} has {bad[0]!r} in it, which apptainer's --bind cannot say; rename it, or use "
                    "cluster.runner = 'bubblewrap'"
                )
        line += ["--bind", f"{mount.source}:{mount.target}:{'rw' if mount.writable else 'ro'}"]
    return [*line, "--pwd", place.workdir, _absolute(place.image), *command]


def own_command(
    python: str, place: ContainerSpec, command: Sequence[str], digest: str | None = None
) -> list[str]:
    """`dure image run`, which finds a way to the image's files and starts bubblewrap."""
    line = [python, "-m", "dure", "image", "run"]
    for mount in place.mounts:
        line += ["--mount", written(mount)]
    if digest is not None:
        line += ["--digest", digest]
    return [*line, "--workdir", place.workdir, "--", _absolute(place.image), *command]


# bubblewrap does not hand on signals, so our runner sends them to the command itself; bubblewrap must then not obey
# those that reach the whole group. It starts with them blocked, and this opens them again for the command.
_UNBLOCK = (
    "import os, signal, sys\n"
    "signal.pthread_sigmask(signal.SIG_SETMASK, [])\n"
    "try:\n"
    "    os.execvp(sys.argv[1], sys.argv[1:])\n"
    "except OSError as error:\n"
    "    sys.exit(print(f'dure: inside the image: {sys.argv[1]}: {error.strerror}', file=sys.stderr) or 127)\n"
)


def bubblewrap_command(
    tree: str,
    mounts: Iterable[Mounted],
    command: Sequence[str],
    *,
    folders: Iterable[str] = (HOME, "/usr", "/etc"),
    links: Mapping[str, str] = LINKS,
    workdir: str = "/",
    host_files: Iterable[tuple[str, str]] = (),
    host_data: Iterable[tuple[int, str]] = (),
    devices: Iterable[str] = (),
    info_fd: int | None = None,
    map_user: tuple[int, int] | None = None,
) -> list[str]:
    """bubblewrap over the image's unpacked or mounted files.

    The root is an empty read-only folder that the image's own folders (and links) are bound to, so that a mount's
    target need not be there in the image. Network, host name and /dev/shm are the node's; the processes are their own,
    so that none outlives the first.
    """
    line = ["bwrap", "--die-with-parent", "--unshare-pid"]
    if info_fd is not None:
        line += ["--info-fd", str(info_fd)]
    if map_user is not None:
        line += ["--unshare-user", "--uid", str(map_user[0]), "--gid", str(map_user[1])]
    for path in folders:
        line += ["--ro-bind", f"{tree}{path}", path]
    for path, link in links.items():
        line += ["--symlink", link, path]
    line += [
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--bind",
        "/dev/shm",
        "/dev/shm",
        "--ro-bind",
        "/sys",
        "/sys",
    ]
    for path in devices:
        line += ["--dev-bind", path, path]
    for path in ("/tmp", "/run", "/var/tmp"):
        line += ["--perms", "1777", "--tmpfs", path]
    for source, target in host_files:
        line += ["--ro-bind", source, target]
    # By descriptor: /etc/hosts may be mounted from a file that has no name any more, and cannot be bound again.
    for descriptor, target in host_data:
        line += ["--perms", "0644", "--ro-bind-data", str(descriptor), target]
    for mount in mounts:
        line += ["--bind" if mount.writable else "--ro-bind", mount.source, mount.target]
    line += ["--remount-ro", "/", "--chdir", workdir]
    # Without it root inside could make read-only mounts writable again.
    line += ["--cap-drop", "CAP_SYS_ADMIN"]
    return [*line, "--", PYTHON, "-I", "-S", "-c", _UNBLOCK, *command]


def import_command(tool: str, uri: str, out: str) -> list[str]:
    """The line that makes an image from a Docker image."""
    if tool == "enroot":
        return ["enroot", "import", "--output", out, "--", uri]
    return ["apptainer", "build", out, uri]


def _refuse_unsafe(runner: str, mount: Mounted, what: str = "mount") -> None:
    for path in (mount.source, mount.target):
        if not _SHELL_SAFE.fullmatch(path):
            bad = next(sign for sign in path if not _SHELL_SAFE.fullmatch(sign))
            raise JobError(
                f"the {what} {path!r} has {bad!r} in it, which {runner} cannot be told; rename it, or use "
                "cluster.runner = 'bubblewrap'"
            )


def _safe_image(runner: str, image: str) -> str:
    _refuse_unsafe(runner, Mounted(image, "/"), "image")
    return _absolute(image)


def _absolute(image: str) -> str:
    if not image.startswith("/"):
        raise JobError(f"the image {image!r} is not an absolute path; write it from the root")
    return image
