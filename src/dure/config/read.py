"""Reading a job file: typed, frozen, checked once, every value with its source."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from dure.base.errors import JobError, UsageError
from dure.base.files import read_at_most
from dure.base.say import printable
from dure.config.cluster import Mount, Toleration, Volume
from dure.config.sections import Job, ParamGroup

LONGEST_JOB = 1 << 20
_DEEPEST = 32
_LISTS = {"groups": ParamGroup, "mounts": Mount, "tolerations": Toleration, "volumes": Volume}
"""Settings that are lists of tables."""


@dataclass(frozen=True)
class LoadedJob:
    """A job with the place it came from and the source of each of its values."""

    job: Job
    folder: Path
    """Relative paths of factories start here."""
    sources: Mapping[str, str]
    """Dotted key → `default`, the file's name, or the option that set it."""

    def to_json(self) -> str:
        """The whole value as text, for the ranks and for the run folder."""
        return json.dumps(
            {
                "job": self.job.model_dump(mode="json"),
                "folder": str(self.folder),
                "sources": dict(self.sources),
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> LoadedJob:
        """The inverse of `to_json`; ValueError for anything else."""
        try:
            raw = json.loads(text)
            sources = {str(key): str(source) for key, source in raw["sources"].items()}
            return cls(Job.model_validate(raw["job"]), Path(raw["folder"]), sources)
        except ValidationError as error:
            raise ValueError(_explain(error)) from None
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"it is no job that dure has written ({type(error).__name__})") from None

    @property
    def storage(self) -> str:
        """The shared storage: a folder, or s3://…."""
        return self.job.storage if "://" in self.job.storage else str(self.folder / self.job.storage)

    def on_nodes(self, fewest: int, most: int) -> LoadedJob:
        """The same job on another number of nodes; raises JobError where it cannot be."""
        raw = self.job.model_dump(mode="json")
        raw["cluster"] |= {"nodes": most, "min_nodes": fewest}
        try:
            return replace(self, job=Job.model_validate(raw))
        except ValidationError as error:
            raise JobError(_explain(error)) from None

    def run_in_storage(self, mark: str) -> Path:
        """Where a run on several nodes keeps its files when nobody says otherwise; `mark` tells runs apart."""
        return Path(self.storage) / "checkpoints" / f"{self.job.name}-{mark}"

    def arguments(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Factory arguments with `{storage}` filled in."""
        return {
            key: value.replace("{storage}", self.storage) if isinstance(value, str) else value
            for key, value in args.items()
        }


def load_job(
    path: Path,
    settings: Mapping[str, str] | None = None,
    ranks: int | str | None = None,
    nodes: str | None = None,
    hosts: str | None = None,
) -> LoadedJob:
    """Read and check a job file. `settings` are dotted keys with TOML values; each beats the file, and
    `ranks`, `nodes` and `hosts` (options of their own) beat them."""
    raw = _read(path)
    sources = dict.fromkeys(_leaves(raw), path.name)
    given = _parsed(settings or {})
    if ranks is not None:
        given |= _span("--ranks", str(ranks), "team.ranks", "team.min_ranks")
    if nodes is not None:
        given |= _span("--nodes", nodes, "cluster.nodes", "cluster.min_nodes")
        if nodes == "1":  # this machine alone, whichever hosts the job names
            given["cluster.hosts"] = ([], "--nodes 1")
    if hosts is not None:
        names = [name.strip() for name in hosts.split(",") if name.strip()]
        given["cluster.hosts"] = (names, f"--hosts {hosts}")
        given.setdefault("cluster.nodes", (len(names), f"--hosts {hosts}"))
    for dotted, (value, source) in given.items():
        _put(raw, dotted, value)
        sources = {key: kept for key, kept in sources.items() if not key.startswith(f"{dotted}.")}
        sources[dotted] = source
    _refuse_odd_values(path, raw)
    try:
        job = Job.model_validate(raw)
    except ValidationError as error:
        raise JobError(f"{path}: {_explain(error)}") from None
    return LoadedJob(job, path.absolute().parent, sources)


def _read(path: Path) -> dict[str, Any]:
    """What the file says, if it is a file, and no longer than anybody writes one."""
    try:
        text = read_at_most(path, LONGEST_JOB).decode()
    except FileNotFoundError:
        raise JobError(
            f"there is no job file {path}; see `dure train --help` for one to start from"
        ) from None
    except UnicodeDecodeError as error:
        raise JobError(
            f"cannot read the job file {path}: it is not UTF-8 ({error.reason} at byte {error.start})"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise JobError(f"cannot read the job file {path}: {reason}") from None
    try:
        raw = tomllib.loads(text)
        _leaves(raw)
    except RecursionError:
        raise JobError(f"{path} is not a job: it is nested too deeply") from None
    except ValueError as error:  # also for a number with thousands of digits
        raise JobError(f"{path} is not valid TOML: {printable(str(error), 200)}") from None
    return raw


def _refuse_odd_values(path: Path, raw: dict[str, Any]) -> None:
    """Refuse what no later reader could bear: endless nesting, and NUL characters, which end a path."""
    level: list[tuple[str, Any]] = [("", raw)]
    for _ in range(_DEEPEST):
        inner: list[tuple[str, Any]] = []
        for key, value in level:
            if isinstance(value, str) and ("\0" in value or not _is_unicode(value)):
                raise JobError(
                    f"{path}: {printable(key, 100)} is {printable(value, 100)}: it has a NUL character in it, or bytes "
                    "that are not UTF-8"
                )
            if isinstance(value, dict):
                inner += [(f"{key}.{name}".lstrip("."), held) for name, held in value.items()]
            elif isinstance(value, list):
                inner += [(key, held) for held in value]
        level = inner
    if level:
        raise JobError(f"{path}: {printable(level[0][0], 100)} is nested more than {_DEEPEST} levels deep")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_settings(options: Sequence[str]) -> dict[str, str]:
    """What `--set section.key=value` options say."""
    settings = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {option}: write it as section.key=value, such as --set train.lr=0.01")
        settings[key.strip()] = value.strip()
    return settings


def all_values(loaded: LoadedJob) -> Iterator[tuple[str, Any, str]]:
    """(dotted key, value, source) of every setting, in the order of the classes above."""
    for key, value in _leaves(loaded.job.model_dump(mode="json"), open_tables=False).items():
        source = loaded.sources.get(key)
        if source is None:
            inner = {kept for name, kept in loaded.sources.items() if name.startswith(f"{key}.")}
            source = ", ".join(sorted(inner)) or "default"
        yield key, value, source


def _parsed(settings: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """Values of `--set` options: TOML where it is TOML, else the plain string."""
    values: dict[str, tuple[Any, str]] = {}
    for dotted, text in settings.items():
        try:
            value: Any = tomllib.loads(f"value = {text}")["value"]
        except RecursionError:
            raise JobError(f"--set {dotted}: its value is nested too deeply") from None
        except ValueError:
            value = text
        values[dotted] = (value, f"--set {dotted}={text}")
    return values


def _span(option: str, text: str, most: str, least: str) -> dict[str, tuple[Any, str]]:
    """What an option such as `--ranks 8` or `--ranks 2:8` says of two settings; the least, if it says one."""
    match = re.fullmatch(r"(?:([0-9]{1,6}):)?([0-9]{1,6})", text)
    if match is None:
        raise JobError(f"{option} {text}: write a number, such as 8, or the least and the most, such as 2:8")
    source = f"{option} {text}"
    return {most: (int(match[2]), source), least: (int(match[1]) if match[1] else None, source)}


def _put(raw: dict[str, Any], dotted: str, value: Any) -> None:
    *outer, last = dotted.split(".")
    table = raw
    for name in outer:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise JobError(f"--set {dotted}: {name} is a value, not a section")
    table[last] = value


def _leaves(table: Mapping[str, Any], prefix: str = "", open_tables: bool = True) -> dict[str, Any]:
    """Dotted key → value. With `open_tables` off, free-form tables (arguments) stay one value."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        section = isinstance(value, dict) and (open_tables or not prefix)
        found |= _leaves(value, f"{prefix}{key}.", open_tables) if section else {f"{prefix}{key}": value}
    return found


def _explain(error: ValidationError) -> str:
    """All that is wrong, one clause each, in the job file's own words."""
    return "; ".join(_explain_one(problem["type"], problem["loc"], problem) for problem in error.errors())


def _explain_one(kind: str, location: tuple[int | str, ...], problem: Any) -> str:
    shown = printable(".".join(str(part) for part in location), 100)
    if kind == "extra_forbidden":
        names = _names_at(location[:-1])
        close = difflib.get_close_matches(str(location[-1]), names, n=1, cutoff=0.5)
        hint = (
            f"did you mean {'.'.join([*map(str, location[:-1]), close[0]])}?"
            if close
            else f"known: {', '.join(names)}"
        )
        return f"unknown key {shown}; {hint}"
    if kind == "missing":
        return f"{shown} is missing"
    if kind == "value_error":
        return str(problem["ctx"]["error"])
    return f"{shown} is {printable(repr(problem['input']), 100)}: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def _names_at(location: tuple[int | str, ...]) -> list[str]:
    """The keys that may stand at this place."""
    here: type[BaseModel] = Job
    for part in location:
        if isinstance(part, int):
            continue
        here = _LISTS.get(part, here.model_fields[part].annotation)  # type: ignore[arg-type, assignment]
    return list(here.model_fields)
