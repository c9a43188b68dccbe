"""What is there inside the image, and what may be written: decided and checked before anything starts."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dure.base.errors import JobError, UsageError
from dure.base.files import make_folders
from dure.config import LoadedJob
from dure.image.contents import HOME

_OWN = (HOME, "/usr", "/etc", "/bin", "/sbin", "/lib", "/lib64", "/proc", "/sys", "/dev")
"""What the image and the kernel bring; nothing is mounted there, above, or below."""


@dataclass(frozen=True)
class Mounted:
    """A folder or file of the node, and where it is inside."""

    source: str
    target: str
    writable: bool = False

    def covers(self, path: str) -> bool:
        """Whether `path` (inside) is this mount's target or below it."""
        return _is_below(path, self.target)

    def source_of(self, path: str) -> str:
        """What `path` (inside) is outside."""
        return os.path.normpath(os.path.join(self.source, os.path.relpath(path, self.target)))


def mounts_of(
    loaded: LoadedJob, run_folder: Path, job_file: Path | None = None, *, of_any_run: bool = False
) -> tuple[Mounted, ...]:
    """The job's mounts, or the default ones, outer before inner; refuses what cannot work or would not be safe.

    `job_file` is for a job file that is a link: its own folder has to be there too. With `of_any_run`, `run_folder` is
    the folder that the run's will be made in, under a name that is not known yet. Nothing is touched.
    """
    given = loaded.job.cluster.mounts
    if given:
        mounts = [
            _explicit(
                _filled(mount.source, loaded, run_folder),
                None if mount.target is None else _filled(mount.target, loaded, run_folder),
                mount.writable,
                f"cluster.mounts.{at}",
            )
            for at, mount in enumerate(given)
        ]
        made_by_run: set[str] = set()
    else:
        mounts = list(_defaults(loaded, run_folder, job_file, of_any_run))
        made_by_run = {mount.target for mount in mounts if mount.writable}
    checked = in_order(mounts)
    for key, path in _written(loaded, run_folder, of_any_run):
        _require_writable(key, path, checked)
    for key, path in _read(loaded):
        _require_there(key, path, checked)
    check_there(checked, made_by_run)
    return checked


def with_files(mounts: Sequence[Mounted], files: Iterable[Path]) -> tuple[Mounted, ...]:
    """The mounts, and each of these files at its own path, read-only, where no mount has it there already."""
    paths = [_plain(str(file)) for file in files]
    covering = [(path, innermost(path, mounts)) for path in paths]
    missing = [path for path, mount in covering if mount is None or mount.source_of(path) != path]
    return in_order([*mounts, *(Mounted(path, path) for path in missing)])


def make_written_folders(
    loaded: LoadedJob, run_folder: Path, mounts: Iterable[Mounted], *, of_any_run: bool = False
) -> None:
    """Make the folders that the run writes to, outside, so that they can be mounted."""
    for key, path in _written(loaded, run_folder, of_any_run):
        mount = innermost(path, mounts)
        if mount is None:
            continue
        outside = mount.source_of(path)
        try:
            make_folders(Path(outside))
        except OSError as error:
            raise JobError(f"cannot make the folder {outside} ({key}): {error.strerror}") from None


def in_order(mounts: Iterable[Mounted]) -> tuple[Mounted, ...]:
    """The mounts, outer before inner, each checked by itself; refuses two of one target."""
    by_target: dict[str, Mounted] = {}
    for mount in mounts:
        _check(mount)
        other = by_target.setdefault(mount.target, mount)
        if other != mount:
            raise JobError(
                f"two mounts have the target {mount.target}: {other.source} and {mount.source}; give one of them "
                "another target"
            )
    return tuple(sorted(by_target.values(), key=lambda mount: PurePosixPath(mount.target).parts))


def check_there(mounts: Sequence[Mounted], made_later: Collection[str] = ()) -> None:
    """Refuse a source that is not there, and a target for which there is no place in the mount that it is within.

    Targets that are `made_later` may be missing yet.
    """
    for mount in mounts:
        if mount.target in made_later:
            continue
        if not os.path.exists(mount.source):
            raise JobError(
                f"the mount's source {mount.source} is not there on this node; mount the storage first, or change "
                "cluster.mounts or storage"
            )
        outer = innermost(mount.target, [other for other in mounts if other != mount])
        if outer is not None and not os.path.exists(place := outer.source_of(mount.target)):
            raise JobError(
                f"{mount.source} is to be mounted on {mount.target}, within the mount {outer.target}, where there is "
                f"no such place; make {place} first, or choose another target"
            )


def innermost(path: str, mounts: Iterable[Mounted]) -> Mounted | None:
    """The mount that `path` (inside) is on."""
    covering = [mount for mount in mounts if mount.covers(path)]
    return max(covering, key=lambda mount: len(PurePosixPath(mount.target).parts), default=None)


def parse_mount(text: str) -> Mounted:
    r"""`SRC[:DST][:rw]` as `--mount` takes it; `\:` stands for a colon in a path, `\\` for a backslash."""
    parts = [re.sub(r"\\(.)", r"\1", part, flags=re.DOTALL) for part in _split(text)]
    writable = len(parts) > 1 and parts[-1] == "rw"
    if len(parts) > 1 and parts[-1] in {"rw", "ro"}:
        parts = parts[:-1]
    if len(parts) > 2 or not all(parts):
        raise UsageError(rf"--mount {text}: write it as SRC[:DST][:rw]; a colon in a path is written \:")
    try:
        return _explicit(parts[0], parts[1] if len(parts) == 2 else None, writable, f"--mount {text}")
    except JobError as error:
        raise UsageError(str(error)) from None


def written(mount: Mounted) -> str:
    """The inverse of `parse_mount`."""
    escape = [re.sub(r"([\\:])", r"\\\1", path) for path in (mount.source, mount.target)]
    return ":".join([*escape, "rw" if mount.writable else "ro"])


def _split(text: str) -> list[str]:
    return re.findall(r"(?:^|:)((?:\\.|[^:\\]|\\$)*)", text, flags=re.DOTALL)


def _filled(text: str, loaded: LoadedJob, run_folder: Path) -> str:
    if "{storage}" in text and "://" in loaded.storage:
        raise JobError(
            f"cluster.mounts has {text}, but the job's storage is {loaded.storage}, which is no folder; leave it out: "
            "a bucket needs no mount"
        )
    storage = os.path.normpath(loaded.storage) if "{storage}" in text else ""
    return text.replace("{storage}", storage).replace("{run}", str(run_folder))


def _explicit(source: str, target: str | None, writable: bool, key: str) -> Mounted:
    for name, path in (("source", source), ("target", target)):
        if path is None:
            continue
        if not os.path.isabs(path) or ".." in PurePosixPath(path).parts:
            raise JobError(
                f"{key}: the {name} {path!r} is relative or has '..' in it; write a plain absolute path"
            )
        if "\0" in path:
            raise JobError(f"{key}: the {name} {path!r} has a NUL character in it")
    source = _plain(source)
    return Mounted(source, source if target is None else _plain(target), writable)


def _defaults(
    loaded: LoadedJob, run_folder: Path, job_file: Path | None, of_any_run: bool
) -> Iterator[Mounted]:
    """Storage and the job's folder read-only; the run's folder and the checkpoints' read-write."""
    writable = list(dict.fromkeys(_plain(path) for _, path in _written(loaded, run_folder, of_any_run)))
    readable = [str(loaded.folder)]
    if "://" not in loaded.storage:
        readable.append(loaded.storage)
    if job_file is not None:
        readable.append(str(Path(os.path.realpath(job_file)).parent))
    for path in writable:
        if not any(other != path and _is_below(path, other) for other in writable):
            yield Mounted(path, path, writable=True)
    for path in dict.fromkeys(map(_plain, readable)):
        if path not in writable:
            yield Mounted(path, path)


def _written(loaded: LoadedJob, run_folder: Path, of_any_run: bool) -> Iterator[tuple[str, str]]:
    """What the run writes to, with the setting that says so; as `checkpoint.where` has it."""
    yield "the run's folder", _plain(str(run_folder))
    rescue = loaded.job.checkpoint.rescue
    if rescue is not None and "://" not in rescue:
        yield "checkpoint.rescue", _plain(str(loaded.folder / rescue))
    folder = loaded.job.checkpoint.folder.replace("{storage}", loaded.storage)
    if not loaded.job.checkpoint.wanted or "://" in folder:
        return
    if not of_any_run:
        yield "checkpoint.folder", _plain(str(run_folder / folder.replace("{run}", run_folder.name)))
    elif os.path.isabs(folder):
        named_by_run = itertools.takewhile(lambda part: "{run}" not in part, PurePosixPath(folder).parts)
        yield "checkpoint.folder", _plain(str(PurePosixPath(*named_by_run)))


def _read(loaded: LoadedJob) -> Iterator[tuple[str, str]]:
    """Files that the job names and that have to be there inside."""
    job = loaded.job
    for key, factory in (
        ("model.factory", job.model.factory),
        ("data.factory", job.data.factory),
        ("data.collate", job.data.collate),
        ("eval.factory", job.eval.factory),
    ):
        if factory is not None and factory.partition(":")[0].endswith(".py"):
            yield key, _plain(str(loaded.folder / factory.partition(":")[0]))
    weights = job.model.weights
    if (
        weights is not None
        and "://" not in weights
        and (os.path.isabs(weights) or "://" not in loaded.storage)
    ):
        yield "model.weights", _plain(os.path.join(loaded.storage, weights))


def _require_writable(key: str, path: str, mounts: Iterable[Mounted]) -> None:
    mount = innermost(path, mounts)
    if mount is not None and mount.writable:
        return
    why = "no mount covers it" if mount is None else f"it is on the mount {mount.target}, which is read-only"
    raise JobError(
        f"{key} is {path}, but inside the image {why}; choose another folder, or add a mount: "
        f'[[cluster.mounts]] source = "{path}", writable = true'
    )


def _require_there(key: str, path: str, mounts: Iterable[Mounted]) -> None:
    if innermost(path, mounts) is None:
        raise JobError(
            f"{key} is {path}, but inside the image no mount covers it; add one: "
            f'[[cluster.mounts]] source = "{os.path.dirname(path)}"'
        )


def _check(mount: Mounted) -> None:
    hidden = next((own for own in _OWN if _is_below(own, mount.target) or _is_below(mount.target, own)), None)
    if hidden is not None:
        raise JobError(
            f"a mount has the target {mount.target}, which would hide the image's own {hidden} (the interpreter, or "
            "what it needs); give it another target, such as /mnt/shared"
        )


def _is_below(path: str, folder: str) -> bool:
    parts, above = PurePosixPath(path).parts, PurePosixPath(folder).parts
    return parts[: len(above)] == above


def _plain(path: str) -> str:
    """Normal form, with one slash at the start."""
    return "/" + os.path.normpath(path).lstrip("/")
