"""Which program runs an image on this node."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from dure.base.errors import JobError
from dure.base.say import say
from dure.config import LoadedJob
from dure.image.digest import digest_of, recorded, verified
from dure.image.runner import ContainerSpec, apptainer_command, enroot_command

_PROGRAMS = {"enroot": ("enroot",), "apptainer": ("apptainer", "singularity"), "bubblewrap": ("bwrap",)}
_TRIAL_SECONDS = 60.0


@dataclass(frozen=True)
class Chosen:
    """What runs the image on this node."""

    runner: str
    program: str
    digest: str
    """The image's sha256: held against the recorded one, but for our own runner, which does that itself."""


def choose_runner(loaded: LoadedJob, image: Path) -> Chosen:
    """The runner of the job's image on this node.

    `auto` takes the first that is installed and starts the image, and says which it passed over; our own is the last,
    and not tried beforehand. One that the job asks for by name is taken as it is, and fails in its own words.
    """
    wanted = loaded.job.cluster.runner
    if wanted == "pyxis":
        raise JobError(
            "cluster.runner is pyxis, which works through srun; start the job with `dure submit`, or choose another "
            "runner"
        )
    digest = ""
    missing: list[str] = []
    passed_over: list[str] = []
    for runner, program in _programs(wanted):
        if shutil.which(program) is None:
            missing.append(program)
            continue
        digest = digest or _digest(runner, image)  # before anything of it runs
        trouble = _trouble(runner, program, image) if wanted == "auto" else ""
        if not trouble:
            if passed_over:
                say(f"{'; '.join(passed_over)}; {program} runs it instead")
            return Chosen(runner, program, digest)
        passed_over.append(f"{program} cannot start {image}: {trouble}")
    raise JobError(
        "; ".join(
            [f"the job has an image, but this node has no {' or '.join(missing)} to run it", *passed_over]
        )
        + "; install one (Debian: apt install bubblewrap), or set cluster.runner"
    )


def _programs(wanted: str) -> list[tuple[str, str]]:
    runners = tuple(_PROGRAMS) if wanted == "auto" else (wanted,)
    return [(runner, program) for runner in runners for program in _PROGRAMS[runner]]


def _digest(runner: str, image: Path) -> str:
    if runner == "bubblewrap":
        return recorded(image) or digest_of(image)
    return verified(image)


def _trouble(runner: str, program: str, image: Path) -> str:
    """Why a program that is installed cannot start the image here; "" when it can.

    By trying: what enroot needs (folders it may write to, user namespaces, squashfuse and fuse-overlayfs that know the
    image's compression) differs from version to version, and so does what apptainer needs without its setuid part.
    """
    place, nothing = ContainerSpec(str(image)), ["/bin/sh", "-c", ":"]
    if runner == "enroot":
        line = enroot_command(place, nothing)
    elif runner == "apptainer":
        line = apptainer_command(place, nothing, program=program)
    else:
        return ""
    try:
        tried = subprocess.run(
            line,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=_TRIAL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it had not ended after {_TRIAL_SECONDS:.0f} s"
    except OSError as error:
        return str(error)
    if tried.returncode == 0:
        return ""
    words = tried.stderr.strip().splitlines()
    return words[-1] if words else f"exit code {tried.returncode}"
